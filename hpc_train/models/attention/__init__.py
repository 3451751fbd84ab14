"""Attention: kernels, plain operations, latent attention of DeepSeek, and rotary positions."""
