package nvidia

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// relist is how long names of a directory that seems unchanged are believed.
const relist = time.Minute

// Glance looks again and again at the files that a scan depends on. What a directory has in it is read again only when the kernel gives the directory
// another time, since some have thousands of names of which a few are of interest; what these are is looked at each time. It is for one goroutine.
type Glance struct {
	paths Paths
	bus   pciBus
	now   func() time.Time
	names map[string]listing
}

// listing is what a directory had in it when it was last read.
type listing struct {
	stamp durable.Stamp
	read  time.Time
	names []string
}

// NewGlance is a look at these files.
func NewGlance(p Paths) *Glance {
	return &Glance{paths: p.withDefaults(), now: time.Now, names: map[string]listing{}}
}

// list names what is of interest in a directory that the kernel gives times, in order. A directory must always be asked for the same.
func (g *Glance) list(dir string, isOfInterest func(name string) bool) ([]string, error) {
	stamp, now := durable.StampOf(dir), g.now()
	if known, ok := g.names[dir]; ok && known.stamp == stamp && now.Sub(known.read) < relist {
		return known.names, nil
	}
	delete(g.names, dir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if isOfInterest(e.Name()) {
			names = append(names, e.Name())
		}
	}
	if stamp.Settled(now) {
		g.names[dir] = listing{stamp, now, names}
	}
	return names, nil
}

// pciBus lists NVIDIA's display controllers again and again. What a PCI function is it reads once for as long as the same function is there: a server has
// hundreds. The zero value is good. It is for one goroutine.
type pciBus struct {
	functions map[string]function // by their addresses
}

type function struct {
	vendor durable.Stamp // of the file that names it: another function has another one
	isGPU  bool
}

// gpus lists what has vendor 10de and class 03xxxx. NVSwitches (0680xx) and audio functions are none.
func (b *pciBus) gpus(sysfs string, now time.Time) ([]device.PCIAddress, error) {
	dir := filepath.Join(sysfs, "bus", "pci", "devices")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	functions := make(map[string]function, len(entries))
	var gpus []device.PCIAddress
	for _, e := range entries {
		vendor := filepath.Join(dir, e.Name(), "vendor")
		f, known := b.functions[e.Name()]
		if stamp := durable.StampOf(vendor); !known || f.vendor != stamp {
			f = function{stamp, readTrimmed(vendor) == "0x10de" && strings.HasPrefix(readTrimmed(filepath.Join(dir, e.Name(), "class")), "0x03")}
		}
		if f.vendor.Settled(now) {
			functions[e.Name()] = f
		}
		if address, err := device.ParsePCIAddress(e.Name()); err == nil && f.isGPU {
			gpus = append(gpus, address)
		}
	}
	b.functions = functions
	slices.Sort(gpus)
	return gpus, nil
}
