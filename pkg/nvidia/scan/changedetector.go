package scan

import (
	"os"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
)

// relistInterval is how long a cached directory listing is used while the directory's time stays
// equal.
const relistInterval = time.Minute

// ChangeDetector notices changes of the files that a scan depends on. It lists a directory again
// only when the directory's time changes, because some directories have thousands of entries. It is
// not safe for concurrent use.
type ChangeDetector struct {
	paths nvidia.Paths
	bus   host.Bus
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
func NewChangeDetector(p nvidia.Paths) *ChangeDetector {
	return &ChangeDetector{paths: p.WithDefaults(), now: time.Now, names: map[string]listing{}}
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

// HasNVIDIADevice reports whether sysfs lists an NVIDIA display controller. The plugin polls it on
// nodes without GPUs, so it must be cheap. It fails if sysfs cannot be read.
func HasNVIDIADevice(sysfs string) (bool, error) {
	gpus, err := host.GPUs(sysfs)
	return len(gpus) > 0, err
}
