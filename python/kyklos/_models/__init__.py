"""What split models of transformers and of diffusers share: the ranks agree on the model, its weights and the errors of each rank."""
