"""Where bytes rest. A store moves bytes and knows nothing of tensors, ranks or commits."""
