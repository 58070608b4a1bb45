"""Architecture tables: what kind of decoder a checkpoint holds, without torch."""
