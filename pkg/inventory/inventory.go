// Package inventory knows which GPUs the node has now. It scans the hardware when there is a reason
// to, keeps the result of the last good scan, and tells who runs it of changes.
//
// A [Snapshot] is immutable and complete. A failed scan does not discard the result of the last
// good scan. The inventory notices a driver that is loaded late, or unloaded and loaded again,
// without a restart. Readers never wait for the hardware.
//
// The inventory does not judge health and publishes nothing.
package inventory

import (
	"cmp"
	"context"
	"errors"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

// Snapshot is the node's state as of the last scan. Readers must not modify it.
type Snapshot struct {
	// Ready is true if the GPUs in Node can be allocated now.
	Ready bool
	// Reason tells an operator why the node is not ready, and what to do. It is empty while Ready.
	Reason string
	// Failure is the error of the latest scan if an earlier scan succeeded. Then Node is the result of
	// the earlier scan and may be outdated. Failure is empty if the latest scan succeeded.
	Failure string
	// Code is one of the constants Code* and says which kind of problem keeps the node from being
	// ready. Since is when the node stopped being ready. Both are zero while the node is ready.
	Code  string
	Since time.Time
	// Known is true once a scan has succeeded since the plugin started. Before that, Node is empty and
	// does not mean that the node has no GPUs.
	Known bool
	// Empty is true if the node has no NVIDIA GPU at all, not even one that cannot be offered.
	Empty bool
	// Files is a digest of the device and driver files before the latest scan, except the files of MIG
	// instances. It changes, for example, when a device node is created again, even if the scan
	// returns the same GPUs.
	Files string
	// Node is the result of the last good scan. Node stays when the driver is unloaded, because claims
	// may still have its GPUs.
	Node nvidia.Node
}

// These codes say why a node offers no GPUs.
const (
	CodeNotScanned    = "not-scanned"    // the first scan has not finished
	CodeDriverMissing = "driver-missing" // the driver or a part of it is missing
	CodeScanFailed    = "scan-failed"    // no scan has succeeded since the start
	CodeNoGPU         = "no-gpu"         // the node has no GPU to offer
)

const (
	// pollUnready is how often the inventory looks for changed device and driver files while the node
	// is not ready.
	pollUnready = time.Second
	// pollReady is how often the inventory looks for changed device and driver files while the node is
	// ready.
	pollReady = 5 * time.Second
	// If the last scan failed or a GPU has a problem, the inventory repeats the scan although no file
	// changes. The pause between scans starts at firstRetry and doubles. Its maximum is failureRetry
	// after a failed scan, and problemRetry while a GPU has a problem.
	firstRetry   = time.Second
	failureRetry = 5 * time.Second
	problemRetry = 30 * time.Second
	// rescanMIG is how often to scan while a GPU is in MIG mode: no file shows that a MIG instance was
	// replaced by another one with the same ID. For a changed MIG mode the health loop requests a
	// scan.
	rescanMIG = time.Minute
	// uncertainGrace is how long the snapshot keeps the last known state of a GPU whose MIG instances
	// cannot be read.
	uncertainGrace = 15 * time.Second
)

// Hardware has the functions by which the inventory reads the hardware. Package nvidia implements
// them.
type Hardware struct {
	// Scan reads everything about the node's GPUs. Scan may wake GPUs.
	Scan func(context.Context) (nvidia.Node, error)
	// Fingerprint returns a digest of the device and driver files. If it changes, the inventory scans.
	// It must be cheap, because the inventory calls it every few seconds.
	Fingerprint func() string
	// Present reports whether any NVIDIA GPU is on the PCI bus. After an error this is unknown.
	// Present must be cheap.
	Present func() (bool, error)
}

// Inventory keeps the current [Snapshot]. Only Run updates the snapshot.
type Inventory struct {
	hardware     Hardware
	current      atomic.Pointer[Snapshot]
	scanRequests wake.Signal

	stopped chan struct{} // closed when Run returns

	mu      sync.Mutex
	waiting []chan struct{} // closed when a scan ends that began later
}

// New returns an inventory that has not scanned yet.
func New(h Hardware) *Inventory {
	i := &Inventory{hardware: h, scanRequests: wake.New(), stopped: make(chan struct{})}
	i.current.Store(&Snapshot{
		Reason: "the node's GPUs have not been scanned yet", Code: CodeNotScanned, Since: time.Now(),
	})
	return i
}

// Snapshot returns the current snapshot. It never blocks.
func (i *Inventory) Snapshot() Snapshot { return *i.current.Load() }

// RequestScan triggers a scan at once. Callers use it when they saw that the hardware differs from
// the snapshot.
func (i *Inventory) RequestScan() { i.scanRequests.Wake() }

// Rescan waits until a scan that began after this call has ended, or until ctx or Run ends.
func (i *Inventory) Rescan(ctx context.Context) {
	done := make(chan struct{})
	i.mu.Lock()
	i.waiting = append(i.waiting, done)
	i.mu.Unlock()
	i.RequestScan()
	select {
	case <-done:
	case <-i.stopped:
	case <-ctx.Done():
	}
}

// Run scans and updates the snapshot until ctx ends. After each change it calls changed. It may be
// called once.
func (i *Inventory) Run(ctx context.Context, changed func()) {
	defer close(i.stopped)
	l := scanLoop{inventory: i, changed: changed, log: klog.FromContext(ctx)}
	for {
		pause := l.step(ctx)
		select {
		case <-ctx.Done():
			return
		case <-i.scanRequests:
			l.next = time.Now()
		case <-time.After(pause):
		}
	}
}

// scanLoop has what Run needs to know to decide when the next scan is due.
type scanLoop struct {
	inventory *Inventory
	changed   func()
	log       klog.Logger

	scanned     bool
	fingerprint string
	next        time.Time     // when to scan even if no file changes; zero means never
	backoff     time.Duration // pause before the next retry
	// uncertain has the GPUs whose MIG instances cannot be read, each with the time when that began.
	uncertain map[device.PCIAddress]time.Time
}

// step scans the hardware if a scan is due. It returns how long Run must wait before the next call
// of step.
func (l *scanLoop) step(ctx context.Context) time.Duration {
	i := l.inventory
	if !i.Snapshot().Known {
		if present, err := i.hardware.Present(); err == nil && !present {
			l.scanned = false
			l.set(Snapshot{
				Reason: "no NVIDIA GPU is on this node's PCI bus: waiting for one to appear", Code: CodeNoGPU,
			})
			return pollUnready
		}
	}
	fingerprint := i.hardware.Fingerprint()
	due := !l.next.IsZero() && !time.Now().Before(l.next)
	switch {
	case !l.scanned || fingerprint != l.fingerprint:
		l.backoff = firstRetry
	case !due:
		return i.pause()
	}
	i.mu.Lock()
	waiting := i.waiting
	i.waiting = nil
	i.mu.Unlock()
	node, err := i.hardware.Scan(ctx)
	if ctx.Err() != nil {
		return 0
	}
	// The fingerprint was read before the scan, so a change of the files during the scan triggers
	// another scan.
	l.scanned, l.fingerprint = true, fingerprint
	l.next = time.Time{}
	if err != nil {
		l.retry(failureRetry)
	} else if slices.ContainsFunc(node.Problems, func(p nvidia.Problem) bool { return !boundToVFIO(node, p.PCIAddress) }) {
		l.retry(problemRetry)
	} else if slices.ContainsFunc(node.GPUs, func(g nvidia.GPU) bool { return g.MIG != nil && g.MIG.Enabled && !g.MIG.ReadOnly }) {
		l.next = time.Now().Add(rescanMIG)
	}
	// A failed scan tells nothing about the state of each GPU, so it must neither start nor end the
	// grace period of a GPU with unreadable MIG instances.
	if err == nil {
		node = l.retainUncertain(node)
	}
	s := i.snapshotOf(node, err)
	s.Files = scan.WithoutInstances(fingerprint)
	l.set(s)
	for _, done := range waiting {
		close(done)
	}
	return i.pause()
}

// boundToVFIO reports whether a VFIO driver has the GPU. A scan finds out nothing new about such a
// GPU until that changes, which the fingerprint shows.
func boundToVFIO(node nvidia.Node, a device.PCIAddress) bool {
	return slices.ContainsFunc(node.Passthrough, func(g device.GPU) bool {
		return g.PCIAddress == a && g.Passthrough != nil && g.Passthrough.BoundByAdmin
	})
}

// retainUncertain adds to the node the last known state of each GPU whose MIG instances cannot be
// read, for example while an admin changes them. Otherwise allocated devices would be unpublished.
// After uncertainGrace it no longer adds the GPU.
func (l *scanLoop) retainUncertain(node nvidia.Node) nvidia.Node {
	last := l.inventory.Snapshot().Node
	since := map[device.PCIAddress]time.Time{}
	for _, p := range node.Problems {
		known := slices.IndexFunc(last.GPUs, func(g nvidia.GPU) bool {
			return g.PCIAddress == p.PCIAddress && g.UUID == p.Uncertain
		})
		if p.Uncertain == "" || known < 0 || last.Driver != node.Driver ||
			last.GPUs[known].MIG == nil || !last.GPUs[known].MIG.Enabled {
			continue
		}
		began, ok := l.uncertain[p.PCIAddress]
		if !ok {
			began = time.Now()
		}
		since[p.PCIAddress] = began
		if time.Since(began) < uncertainGrace {
			node.GPUs = append(slices.Clone(node.GPUs), last.GPUs[known])
			slices.SortFunc(node.GPUs, func(a, b nvidia.GPU) int { return cmp.Compare(a.PCIAddress, b.PCIAddress) })
		}
	}
	l.uncertain = since
	return node
}

func (l *scanLoop) retry(atLeastEvery time.Duration) {
	l.backoff = min(l.backoff, atLeastEvery)
	l.next = time.Now().Add(l.backoff)
	l.backoff *= 2
}

func (i *Inventory) pause() time.Duration {
	if i.Snapshot().Ready {
		return pollReady
	}
	return pollUnready
}

// snapshotOf returns the snapshot for the result of a scan. If the scan failed, err is set, and the
// snapshot keeps the node from the last good scan.
func (i *Inventory) snapshotOf(node nvidia.Node, err error) Snapshot {
	last := i.Snapshot()
	var unready *nvidia.NotReadyError
	switch {
	case errors.As(err, &unready):
		node := last.Node
		node.Passthrough = unready.Passthrough
		return Snapshot{Known: last.Known, Node: node, Reason: unready.Error(), Code: CodeDriverMissing}
	case err != nil && last.Known:
		return Snapshot{Ready: last.Ready, Reason: last.Reason, Code: last.Code, Known: true, Node: last.Node, Failure: err.Error()}
	case err != nil:
		return Snapshot{Reason: err.Error(), Code: CodeScanFailed}
	case len(node.GPUs) == 0:
		_, unreadable := i.hardware.Present() // if the PCI bus cannot be read, there may be a GPU
		return Snapshot{
			Known: true, Node: node, Reason: noGPUReason(node), Code: CodeNoGPU,
			Empty: len(node.Problems) == 0 && unreadable == nil,
		}
	default:
		return Snapshot{Ready: true, Known: true, Node: node}
	}
}

// noGPUReason returns the text that tells an operator why no GPU of the node can be offered.
func noGPUReason(node nvidia.Node) string {
	if len(node.Problems) == 0 {
		return "the NVIDIA driver is loaded and lists no GPU"
	}
	reason := "no GPU of this node can be offered"
	for _, p := range node.Problems {
		reason += "; " + p.String()
	}
	return reason
}

func (l *scanLoop) set(s Snapshot) {
	last := l.inventory.Snapshot()
	if s.Code != "" {
		s.Since = cmp.Or(last.Since, time.Now()) // last has none if it was ready
	}
	if reflect.DeepEqual(last, s) {
		return
	}
	l.inventory.current.Store(&s)
	logChange(l.log, last, s)
	l.changed()
}

// logChange logs what differs between the snapshots last and s. A problem that was already in last
// is not logged again.
func logChange(log klog.Logger, last, s Snapshot) {
	switch {
	case s.Ready && !reflect.DeepEqual(last.Node, s.Node):
		instances := 0
		for _, g := range s.Node.GPUs {
			instances += len(ptr.Deref(g.MIG, device.MIG{}).Instances)
		}
		log.Info("Found GPUs", "gpus", len(s.Node.GPUs), "migInstances", instances,
			"driver", s.Node.Driver.Version, "cuda", s.Node.Driver.CUDAVersion)
	case s.Ready && !last.Ready:
		log.Info("GPUs are ready again", "gpus", len(s.Node.GPUs))
	case !s.Ready && s.Reason != last.Reason:
		log.Info("Node offers no GPUs", "reason", s.Reason)
	}
	if s.Failure != "" && s.Failure != last.Failure {
		log.Error(nil, "Failed to scan GPUs; keeping the result of the last good scan", "failure", s.Failure)
	}
	for _, p := range s.Node.Problems {
		if !slices.Contains(last.Node.Problems, p) {
			log.Info("GPU is not offered, or only in part", "gpu", p.PCIAddress, "reason", p.Message)
		}
	}
	for _, p := range s.Node.Omissions {
		if !slices.Contains(last.Node.Omissions, p) {
			log.Info("Left something out; the GPUs are offered", "kind", p.Kind, "name", p.Name, "reason", p.Message)
		}
	}
}
