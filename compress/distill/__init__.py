"""Training that repairs a student by its teacher."""
