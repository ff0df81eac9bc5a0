// Package inventory knows what the node has now. It looks at the hardware when there is a reason to, keeps the last good answer, and tells its
// readers when something changed.
//
// What it promises: a [Snapshot] is immutable and whole, never a pool half read; a look that fails does not take away what the last good one found;
// a driver that comes late, or goes and comes back, is noticed without a restart. Readers never wait for the hardware.
//
// It does not judge health, and it publishes nothing itself.
package inventory

import (
	"cmp"
	"context"
	"errors"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// Snapshot is what the node had when the inventory last looked. It must not be changed.
type Snapshot struct {
	// Ready says that the GPUs in Node can be handed out now.
	Ready bool
	// Reason says why not, and the way out. Empty while Ready.
	Reason string
	// Failure is why the latest look failed although an earlier one succeeded: Node may be out of date. Empty when it did not.
	Failure string
	// Code says why the node is not ready, as one of the Code constants. Since says since when the node
	// has not been ready. Both are zero while it is.
	Code  string
	Since time.Time
	// Known says that a look has succeeded since the start: Node is what it found. Before, Node is empty and says nothing about the node,
	// least of all that it has no GPUs.
	Known bool
	// Empty says that the latest look found no GPU because there is none: not even one on the PCI bus that cannot be offered.
	Empty bool
	// Files is the fingerprint of the files from before the latest look, without those of MIG instances. Another one says that something was made anew, device nodes for example,
	// even where the look found the same GPUs.
	Files string
	// Node is the last good answer. It outlives a driver that is taken away, because claims on its GPUs do too.
	Node nvidia.Node
}

// What is wrong with the node's hardware.
const (
	CodeNotScanned    = "not-scanned"    // the first scan has not ended
	CodeDriverMissing = "driver-missing" // the driver, or a part of it, is missing
	CodeScanFailed    = "scan-failed"    // no scan has succeeded since the start
	CodeNoGPU         = "no-gpu"         // the node has no GPU that can be offered
)

const (
	// whileUnready is how often the files are looked at while the node cannot serve.
	whileUnready = time.Second
	// whileReady is how often they are looked at while it can.
	whileReady = 5 * time.Second
	// While files don't change but the last look failed or a GPU has a problem, full looks are repeated, first after firstRetry, then ever more
	// seldom, at least every failureRetry or problemRetry.
	firstRetry   = time.Second
	failureRetry = 5 * time.Second
	problemRetry = 30 * time.Second
	// whileCut is how often a full look is taken where GPUs are in MIG mode: that an instance was replaced by another with the same ID shows in no file.
	// whileCuttable is how often where they could be, whatever Doubt is told: that an admin has changed the mode shows in none either.
	whileCut      = time.Minute
	whileCuttable = 5 * time.Minute
	// keepUncertain is how long a card is offered as it was known while its MIG instances cannot be read: a few looks.
	keepUncertain = 15 * time.Second
)

// Hardware is what the inventory looks at. Package nvidia has it.
type Hardware struct {
	// Scan takes a full look. It may wake GPUs.
	Scan func(context.Context) (nvidia.Node, error)
	// Fingerprint is equal as long as there is no reason for a full look. It must be cheap.
	Fingerprint func() string
	// Present says whether there is an NVIDIA GPU on the PCI bus at all. An error means that nobody knows. It must be cheap.
	Present func() (bool, error)
}

// Inventory keeps the current [Snapshot]. Run must be called for it to learn anything.
type Inventory struct {
	hardware Hardware
	current  atomic.Pointer[Snapshot]
	changed  chan struct{}
	doubt    chan struct{}
}

// New returns an inventory that knows nothing yet.
func New(h Hardware) *Inventory {
	i := &Inventory{hardware: h, changed: make(chan struct{}, 1), doubt: make(chan struct{}, 1)}
	i.current.Store(&Snapshot{
		Reason: "the node's GPUs have not been looked at yet", Code: CodeNotScanned, Since: time.Now(),
	})
	return i
}

// Snapshot is the state of knowledge. It never blocks.
func (i *Inventory) Snapshot() Snapshot { return *i.current.Load() }

// Changed delivers a value after the snapshot has changed. Changes coalesce: read the snapshot after receiving.
func (i *Inventory) Changed() <-chan struct{} { return i.changed }

// Doubt has a full look taken at once: somebody has seen that a card is not what the snapshot says.
func (i *Inventory) Doubt() {
	select {
	case i.doubt <- struct{}{}:
	default:
	}
}

// Run looks until ctx ends.
func (i *Inventory) Run(ctx context.Context) {
	l := looker{inventory: i, log: klog.FromContext(ctx)}
	for {
		pause := l.look(ctx)
		select {
		case <-ctx.Done():
			return
		case <-i.doubt:
			l.next = time.Now()
		case <-time.After(pause):
		}
	}
}

// looker decides when a full look is due.
type looker struct {
	inventory *Inventory
	log       klog.Logger

	looked      bool
	fingerprint string
	next        time.Time     // when to look again without a change of the files; zero for never
	backoff     time.Duration // between such looks
	// uncertain is since when the instances of a card cannot be read.
	uncertain map[device.PCIAddress]time.Time
}

// look takes one turn and says how long to pause.
func (l *looker) look(ctx context.Context) time.Duration {
	i := l.inventory
	if !i.Snapshot().Known {
		if present, err := i.hardware.Present(); err == nil && !present {
			l.looked = false
			i.set(l.log, Snapshot{
				Reason: "no NVIDIA GPU is on this node's PCI bus: nothing to do until one appears", Code: CodeNoGPU,
			})
			return whileUnready
		}
	}
	fingerprint := i.hardware.Fingerprint()
	due := !l.next.IsZero() && !time.Now().Before(l.next)
	if l.looked && fingerprint == l.fingerprint && !due {
		return i.pause()
	}
	if !l.looked || fingerprint != l.fingerprint {
		l.backoff = firstRetry
	}
	node, err := i.hardware.Scan(ctx)
	if ctx.Err() != nil {
		return 0
	}
	// The fingerprint from before the look: what changed meanwhile is a reason for another.
	l.looked, l.fingerprint = true, fingerprint
	l.next = time.Time{}
	if err != nil {
		l.retry(failureRetry)
	} else if len(node.Problems) > 0 {
		l.retry(problemRetry)
	} else if pause := afterAll(node.GPUs); pause > 0 {
		l.next = time.Now().Add(pause)
	}
	if err == nil { // one that failed says nothing of any card, and so neither begins nor ends the time for which one is kept
		node = l.keep(node)
	}
	s := i.judge(node, err)
	s.Files = nvidia.WithoutInstances(fingerprint)
	i.set(l.log, s)
	return i.pause()
}

// afterAll is how long after a full look the next one is due although no file has changed, 0 if it never is.
func afterAll(gpus []nvidia.GPU) time.Duration {
	pause := time.Duration(0)
	for _, g := range gpus {
		switch {
		case g.MIG == nil || g.MIG.Uncuttable:
		case g.MIG.Enabled:
			return whileCut
		default:
			pause = whileCuttable
		}
	}
	return pause
}

// keep leaves a card as it was known that is well but for its MIG instances: one of them that cannot be read, in the middle of somebody's cut for example,
// must not take from schedulers what claims hold beside it. Nothing is cut by what is only known: that is looked at again. It ends with keepUncertain.
func (l *looker) keep(node nvidia.Node) nvidia.Node {
	last := l.inventory.Snapshot().Node
	since := map[device.PCIAddress]time.Time{}
	for _, p := range node.Problems {
		known := slices.IndexFunc(last.GPUs, func(g nvidia.GPU) bool { return g.PCIAddress == p.PCIAddress && g.UUID == p.Uncertain })
		if p.Uncertain == "" || known < 0 || last.Driver != node.Driver || last.GPUs[known].MIG == nil || !last.GPUs[known].MIG.Enabled {
			continue
		}
		began, ok := l.uncertain[p.PCIAddress]
		if !ok {
			began = time.Now()
		}
		since[p.PCIAddress] = began
		if time.Since(began) < keepUncertain {
			node.GPUs = append(slices.Clone(node.GPUs), last.GPUs[known])
			slices.SortFunc(node.GPUs, func(a, b nvidia.GPU) int { return cmp.Compare(a.PCIAddress, b.PCIAddress) })
		}
	}
	l.uncertain = since
	return node
}

func (l *looker) retry(atLeastEvery time.Duration) {
	l.backoff = min(l.backoff, atLeastEvery)
	l.next = time.Now().Add(l.backoff)
	l.backoff *= 2
}

func (i *Inventory) pause() time.Duration {
	if i.Snapshot().Ready {
		return whileReady
	}
	return whileUnready
}

// judge makes a snapshot of what a full look said.
func (i *Inventory) judge(node nvidia.Node, err error) Snapshot {
	last := i.Snapshot()
	var unready *nvidia.NotReadyError
	switch {
	case errors.As(err, &unready):
		return Snapshot{Known: last.Known, Node: last.Node, Reason: unready.Error(), Code: CodeDriverMissing}
	case err != nil && last.Known:
		return Snapshot{Ready: last.Ready, Reason: last.Reason, Code: last.Code, Known: true, Node: last.Node, Failure: err.Error()}
	case err != nil:
		return Snapshot{Reason: err.Error(), Code: CodeScanFailed}
	case len(node.GPUs) == 0:
		_, unreadable := i.hardware.Present() // a look cannot say what is on a bus that cannot be read
		return Snapshot{Known: true, Node: node, Reason: noGPU(node), Code: CodeNoGPU, Empty: len(node.Problems) == 0 && unreadable == nil}
	default:
		return Snapshot{Ready: true, Known: true, Node: node}
	}
}

// noGPU explains an answer without a GPU that can be offered.
func noGPU(node nvidia.Node) string {
	if len(node.Problems) == 0 {
		return "the NVIDIA driver is loaded and lists no GPU"
	}
	reason := "no GPU of this node can be offered"
	for _, p := range node.Problems {
		reason += "; " + p.String()
	}
	return reason
}

func (i *Inventory) set(log klog.Logger, s Snapshot) {
	last := i.Snapshot()
	if s.Code != "" {
		s.Since = last.Since
	}
	if s.Code != "" && last.Code == "" {
		s.Since = time.Now()
	}
	if reflect.DeepEqual(last, s) {
		return
	}
	i.current.Store(&s)
	tell(log, last, s)
	select {
	case i.changed <- struct{}{}:
	default:
	}
}

// tell logs what an operator wants to know, each thing once.
func tell(log klog.Logger, last, s Snapshot) {
	switch {
	case s.Ready && last.Ready && reflect.DeepEqual(uncut(last.Node), uncut(s.Node)):
		if !reflect.DeepEqual(last.Node, s.Node) {
			log.Info("MIG instances have changed", "gpus", recut(last.Node, s.Node))
		}
	case s.Ready && !reflect.DeepEqual(last.Node, s.Node):
		log.Info("GPUs found", "gpus", len(s.Node.GPUs), "driver", s.Node.Driver.Version, "cuda", s.Node.Driver.CUDAVersion)
	case s.Ready && !last.Ready:
		log.Info("GPUs are ready again", "gpus", len(s.Node.GPUs))
	case !s.Ready && s.Reason != last.Reason:
		log.Info("This node offers no GPUs for now", "reason", s.Reason)
	}
	if s.Failure != "" && s.Failure != last.Failure {
		log.Error(nil, "Looking at the GPUs failed, keeping what is known", "failure", s.Failure)
	}
	known := map[nvidia.Problem]bool{}
	for _, p := range last.Node.Problems {
		known[p] = true
	}
	for _, p := range s.Node.Problems {
		if !known[p] {
			log.Info("A GPU is not offered, or not in every shape", "gpu", p.PCIAddress, "reason", p.Message)
		}
	}
}

// uncut is a node without the instances that its GPUs are cut into: they come and go with claims.
func uncut(n nvidia.Node) nvidia.Node {
	n.GPUs = slices.Clone(n.GPUs)
	for i, g := range n.GPUs {
		if g.MIG != nil {
			mig := *g.MIG
			mig.Instances = nil
			n.GPUs[i].MIG = &mig
		}
	}
	return n
}

// recut names the GPUs of which the instances are others, on nodes that are otherwise alike.
func recut(last, now nvidia.Node) []string {
	var names []string
	for i, g := range now.GPUs {
		if !reflect.DeepEqual(last.GPUs[i].MIG, g.MIG) {
			names = append(names, g.WholeName())
		}
	}
	return names
}
