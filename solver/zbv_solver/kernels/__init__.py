"""How compiled kernels are made, and the arrays that they take. Each kernel is in the module that calls it."""
