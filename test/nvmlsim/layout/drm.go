package layout

import (
	"fmt"
	"os"
	"path/filepath"
)

// majorDRM is the major number of all DRM devices (Linux device list). A render node's minor is
// minorRender more than that of the card. The first cards are left to the machine's own display
// adapters, so that no device node made here can reach one.
const (
	majorDRM    = 226
	minorRender = 128
	firstCard   = 32
)

// drmDevice is a DRM device of a GPU, in /dev/dri and in the drm folder of its PCI device.
type drmDevice struct {
	name, kind string
	minor      uint32
}

// drmDevices returns the DRM devices of the node's GPU with this index. nvidia-drm gives each GPU
// both, whatever its parameter modeset (open-gpu-kernel-modules, nvidia-drm-drv.c).
func (c *Config) drmDevices(index int) []drmDevice {
	if !c.Node.DRMNodes {
		return nil
	}
	card, render := uint32(firstCard+index), uint32(firstCard+index+minorRender)
	return []drmDevice{
		{name: fmt.Sprintf("card%d", card), kind: "card", minor: card},
		{name: fmt.Sprintf("renderD%d", render), kind: "render", minor: render},
	}
}

// applyDRM creates the DRM device nodes of the GPUs and udev's links to them, or removes them while
// the driver is not loaded. They are in the machine's /dev also for a driver container, because the
// kernel itself makes them there.
func (c *Config) applyDRM(v view) error {
	folder := filepath.Join(c.Dev, "dri")
	for i, card := range c.Node.GPUs {
		wanted := !c.NoDevices && v.loaded && v.gpus[i].attached
		for _, d := range c.drmDevices(i) {
			node := filepath.Join(folder, d.name)
			byPath := filepath.Join(folder, "by-path", fmt.Sprintf("pci-%s-%s", card.PCI, d.kind))
			if wanted {
				if err := c.makeNode(folder, deviceNode{name: d.name, major: majorDRM, minor: d.minor, mode: 0o666}); err != nil {
					return err
				}
				if err := link(filepath.Join("..", d.name), byPath); err != nil {
					return err
				}
				continue
			}
			if err := os.RemoveAll(byPath); err != nil {
				return err
			}
			if err := removeNode(node); err != nil {
				return err
			}
		}
	}
	if c.Node.DRMNodes {
		for _, empty := range []string{filepath.Join(folder, "by-path"), folder} {
			_ = os.Remove(empty) // fails if the folder is not empty
		}
	}
	return nil
}
