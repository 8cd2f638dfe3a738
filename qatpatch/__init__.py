"""Patch diffusion transformers in place for NVFP4 training and inference."""
