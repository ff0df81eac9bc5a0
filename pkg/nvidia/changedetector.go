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

// relistInterval is how long a cached directory listing is used while the directory's time stays
// equal.
const relistInterval = time.Minute

// ChangeDetector notices changes of the files that a scan depends on. It lists a directory again
// only when the directory's time changes, because some directories have thousands of entries. It is
// not safe for concurrent use.
type ChangeDetector struct {
	paths Paths
	bus   pciBus
	now   func() time.Time
	names map[string]listing
}

// listing is a directory's cached list of names.
type listing struct {
	stamp durable.Stamp
	read  time.Time
	names []string
}

// NewChangeDetector returns a detector for the files of p.
func NewChangeDetector(p Paths) *ChangeDetector {
	return &ChangeDetector{paths: p.withDefaults(), now: time.Now, names: map[string]listing{}}
}

// list returns the names in dir for which isOfInterest is true, sorted. The result is cached by
// dir, so every call for one directory must pass the same filter.
func (c *ChangeDetector) list(dir string, isOfInterest func(name string) bool) ([]string, error) {
	stamp, now := durable.StampOf(dir), c.now()
	if known, ok := c.names[dir]; ok && known.stamp == stamp && now.Sub(known.read) < relistInterval {
		return known.names, nil
	}
	delete(c.names, dir)
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
		c.names[dir] = listing{stamp, now, names}
	}
	return names, nil
}

// pciBus lists NVIDIA's display controllers on the PCI bus. A server has hundreds of PCI functions,
// so pciBus reads a function's files only once, until another function takes its address. The zero
// value is ready to use. It is not safe for concurrent use.
type pciBus struct {
	functions map[string]function // by PCI address
}

type function struct {
	vendor durable.Stamp // stamp of the file vendor, which another function replaces
	isGPU  bool
}

// gpus lists the PCI functions with vendor 10de and class 03xxxx. NVSwitches (0680xx) and audio
// functions do not match.
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
			f = function{stamp, readTrimmed(vendor) == "0x10de" &&
				strings.HasPrefix(readTrimmed(filepath.Join(dir, e.Name(), "class")), "0x03")}
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
