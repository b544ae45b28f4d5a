"""Benchmarks of the GPU kernels, alone and in a whole denoising step."""
