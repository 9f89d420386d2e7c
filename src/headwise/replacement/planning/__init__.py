"""Choose an operator for every head: record attention, fit candidates, measure drift, search."""
