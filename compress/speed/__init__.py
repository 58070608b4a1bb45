"""How fast a checkpoint is here: predicted from the machine, and measured."""
