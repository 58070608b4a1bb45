"""Who loads a result, and how: facts about loaders, as data."""
