"""Forms in which the weights of linears lie for their products, and which weight takes which."""
