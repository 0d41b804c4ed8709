"""What a call may be given beside plain tensors: lists, DTensors, proxies of torch.fx; what autocast makes of it."""
