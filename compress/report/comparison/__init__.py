"""Several results of one model beside each other: as records, a table and a page."""
