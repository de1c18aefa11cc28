"""Statistics of a model's own inputs on a text, for methods of quantization that need them."""
