"""What a model's stages and layers hold and compute, found without running them on anything."""
