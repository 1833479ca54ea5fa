"""Matrix sign functions for models that orthogonalize in their forward pass, with derivatives of every order."""
