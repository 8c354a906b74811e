"""Speed and precision of the ridge solve's kernels, of the layers around them, and of MesaNet's peer."""
