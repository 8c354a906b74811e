"""What training 1.3B and 7B parameters on 64 and 1024 H200s should take, computed and not measured."""
