package layout

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// majorDRM is the major number of all DRM devices (Linux device list). A render node's minor is
// minorRender more than that of the card. The first cards are left to the machine's own display
// adapters, so that no device node made here can reach one.
const (
	majorDRM    = 226
	minorRender = 128
	firstCard   = 32
)

// groups are the groups video and render of a Debian host, to which udev gives the device nodes.
var groups = map[string]uint32{"card": 44, "render": 104}

// drmDevice is a DRM device of a GPU, in /dev/dri and in the drm folder of its PCI device.
type drmDevice struct {
	name, kind string
	minor      uint32
}

// noteGraphics records the MIG devices with graphics that each GPU has while the driver is loaded.
// nvidia-drm makes its devices then, and never again (nv_drm_probe_devices).
func (c *Config) noteGraphics(f *state.File) {
	c.GraphicsDevices = make([]int, f.GPUCount())
	for i := range c.GraphicsDevices {
		g := f.GPU(i)
		for _, instance := range g.GPUInstances() {
			profile, ok := f.Model(int(g.Model)).Profile(instance.Profile)
			if ok && strings.HasSuffix(state.Text(profile.Name[:]), "+gfx") {
				c.GraphicsDevices[i] += len(g.OfInstance(instance.ID))
			}
		}
	}
}

// drmDevices returns the DRM devices of the node's GPU with this index: a card and a render node,
// whatever nvidia-drm's parameter modeset. From driver 575.51 on a GPU has both for each of its MIG
// devices with graphics instead (open-gpu-kernel-modules, nvidia-drm-drv.c).
func (c *Config) drmDevices(index int) []drmDevice {
	if !c.Node.DRMNodes {
		return nil
	}
	pairs := func(gpu int) int {
		if gpu < len(c.GraphicsDevices) {
			return max(1, c.GraphicsDevices[gpu])
		}
		return 1
	}
	number := firstCard
	for before := range index {
		number += pairs(before)
	}
	var devices []drmDevice
	for range pairs(index) {
		card, render := uint32(number), uint32(number+minorRender) //nolint:gosec // far fewer than the minors of DRM
		devices = append(devices, drmDevice{name: fmt.Sprintf("card%d", card), kind: "card", minor: card},
			drmDevice{name: fmt.Sprintf("renderD%d", render), kind: "render", minor: render})
		number++
	}
	return devices
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
				node := deviceNode{name: d.name, major: majorDRM, minor: d.minor, mode: 0o660, gid: groups[d.kind]}
				if err := c.makeNode(folder, node); err != nil {
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
