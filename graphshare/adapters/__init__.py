"""One engine or kernel library each. Importing this imports none of them."""
