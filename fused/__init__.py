"""What makes a step faster and changes its last bits. On by default where CUDA is; ``speed.reference`` leaves it out."""
