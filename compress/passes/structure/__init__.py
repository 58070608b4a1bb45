"""The passes of edits that look at data: two chains, the source's and the edited model's."""
