"""Whether the training of MesaNet breaks off."""
