"""How much a bundle differs from its reference: perplexity, KL divergence, and limits that can fail a build."""
