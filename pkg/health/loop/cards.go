package loop

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// syncCards adds the inventory's GPUs to the monitor. It removes GPUs from the monitor that were
// unplugged and that no claim holds. It returns the node's GPUs: those of the inventory, and the
// unhealthy ones that it lacks.
func (l *Loop) syncCards() []device.GPU {
	s := l.opts.Inventory.Snapshot()
	if !s.Known {
		return nil
	}
	gpus := make([]device.GPU, 0, len(s.Node.GPUs))
	for _, g := range s.Node.GPUs {
		gpus = append(gpus, g.GPU)
	}
	l.monitor.Lend(l.lent(s), time.Now())
	l.monitor.Leave(bound(s))
	l.monitor.Expect(gpus, time.Now())
	for _, g := range absent(l.monitor.View(), s) {
		if l.removedForGood(s, g) {
			l.monitor.Forget(g.PCIAddress)
		} else {
			gpus = append(gpus, g)
		}
	}
	return gpus
}

// bound returns the addresses of the GPUs to which a VFIO driver is bound.
func bound(s inventory.Snapshot) (addresses []device.PCIAddress) {
	for _, g := range s.Node.Passthrough {
		if g.Passthrough != nil && g.Passthrough.BoundByAdmin {
			addresses = append(addresses, g.PCIAddress)
		}
	}
	return addresses
}

// Missing returns the unhealthy GPUs that s lacks, except those that were unplugged and that no
// claim holds.
func (l *Loop) Missing(s inventory.Snapshot) []device.GPU {
	return slices.DeleteFunc(absent(l.View(), s), func(g device.GPU) bool { return l.removedForGood(s, g) })
}

// returnGrace is how long after a claim's end its GPU still counts as lent, unless a scan finds it.
const returnGrace = time.Minute

// Lent returns the GPUs that claims have for virtual machines and that s lacks: as they were
// before, or else as sysfs describes them.
func (l *Loop) Lent(s inventory.Snapshot) []device.GPU {
	var gpus []device.GPU
	for address := range l.lent(s) {
		if lists(s, address) {
			continue
		}
		g, known := l.View().Known(address)
		if !known {
			i := slices.IndexFunc(s.Node.Passthrough, func(g device.GPU) bool { return g.PCIAddress == address && g.Passthrough != nil })
			if i < 0 {
				continue
			}
			g = s.Node.Passthrough[i]
			facts := *g.Passthrough
			facts.BoundByAdmin = false // it is the claim that has it bound
			g.Passthrough = &facts
		}
		gpus = append(gpus, g)
	}
	slices.SortFunc(gpus, func(a, b device.GPU) int { return strings.Compare(string(a.PCIAddress), string(b.PCIAddress)) })
	return gpus
}

// lent returns the addresses of the GPUs that claims have for virtual machines, or had until less
// than returnGrace ago if no scan has found them since. While the devices of a claim are unknown,
// those of the last read count.
func (l *Loop) lent(s inventory.Snapshot) map[device.PCIAddress]bool {
	entries, err := l.opts.Records.List()
	now, lent := time.Now(), map[device.PCIAddress]bool{}
	unknown := err != nil || slices.ContainsFunc(entries, func(e checkpoint.Entry) bool { return e.Inexact })
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range entries {
		for _, name := range e.Devices {
			if n, ok := device.ParseName(name); ok && n.Passthrough {
				lent[n.PCIAddress()] = true
				l.lastLent[n.PCIAddress()] = now
			}
		}
	}
	maps.DeleteFunc(l.lastLent, func(_ device.PCIAddress, last time.Time) bool { return !unknown && now.Sub(last) >= returnGrace })
	for address := range l.lastLent {
		if err != nil || !s.Ready || s.Failure != "" || !lists(s, address) {
			lent[address] = true
		}
	}
	return lent
}

func lists(s inventory.Snapshot, a device.PCIAddress) bool {
	return slices.ContainsFunc(s.Node.GPUs, func(g nvidia.GPU) bool { return g.PCIAddress == a })
}

// absent returns the unhealthy GPUs of the view that s lacks.
func absent(v *health.View, s inventory.Snapshot) []device.GPU {
	listed := make([]device.PCIAddress, len(s.Node.GPUs))
	for i, g := range s.Node.GPUs {
		listed[i] = g.PCIAddress
	}
	return v.Missing(listed, time.Now())
}

// removedForGood reports whether the GPU g, which the inventory no longer finds, was unplugged and
// no claim holds it. While the GPU driver is not ready, the answer is false, because g may come
// back together with the driver.
func (l *Loop) removedForGood(s inventory.Snapshot, g device.GPU) bool {
	onBus := slices.ContainsFunc(s.Node.Problems, func(p nvidia.Problem) bool { return p.PCIAddress == g.PCIAddress })
	if onBus || s.Failure != "" || !s.Ready && !s.Empty {
		return false
	}
	used, err := l.opts.InUse(g.WholeName())
	return err == nil && !used
}
