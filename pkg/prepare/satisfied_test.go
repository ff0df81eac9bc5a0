package prepare

import "github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"

var _ Partitions = &nvidia.Partitions{}
