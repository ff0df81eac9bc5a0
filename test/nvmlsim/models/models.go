// Package models gives tests the GPU model files of this folder, wherever they run.
package models

import (
	"embed"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

//go:embed *.yaml
var files embed.FS

// Read returns the GPU model with this key, such as h100-sxm5-80gb.
func Read(key string) (*model.GPU, error) {
	data, err := files.ReadFile(key + ".yaml")
	if err != nil {
		return nil, err
	}
	return model.ParseGPU(key, data)
}
