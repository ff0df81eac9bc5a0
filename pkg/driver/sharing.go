package driver

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/supervisor"
)

// mpsTimeout bounds how long the supervisor of MPS is waited for where no claim waits.
const mpsTimeout = 5 * time.Second

// absentFor is how long the supervisor may be absent before it is said to be: it starts beside the plugin.
const absentFor = time.Minute

// Supervisor runs the control daemons of MPS, in a Pod of its own.
type Supervisor interface {
	Start(ctx context.Context, d mps.Daemon) error
	Stop(ctx context.Context, id string) error
	List(ctx context.Context) ([]mps.Status, error)
}

var _ Supervisor = &mps.Client{}

// supervised shows in the metrics what starting a daemon costs, and lets claims be given back on a node that has lost its supervisor.
type supervised struct {
	Supervisor
	paths   mps.Paths
	proc    string // where the node's processes are seen
	metrics *metrics.Metrics
}

func (t supervised) Start(ctx context.Context, d mps.Daemon) error {
	start := time.Now()
	err := t.Supervisor.Start(ctx, d)
	t.metrics.MPSStart(time.Since(start), err != nil)
	return err
}

func (t supervised) Stop(ctx context.Context, id string) error {
	err := t.Supervisor.Stop(ctx, id)
	if absent := new(mps.NotRunningError); errors.As(err, &absent) {
		return supervisor.Forget(ctx, t.paths, t.proc, id)
	}
	return err
}

// toldShares is what was last said of devices that are not shared as the configuration has it, or were before.
type toldShares struct {
	notShared, noFractions, ending string
}

// inShares adds to offerings what several claims may hold.
func (d *Driver) inShares(offerings []device.Offering, v device.Driver, f Features) []device.Offering {
	rules, _ := d.shareRules(f)
	possible := device.WhyNotShared(f.PartitionedDevices, f.ConsumableCapacity) == ""
	shared := slices.Clone(offerings)
	for i := range shared {
		o := &shared[i]
		o.Shares, o.NoFractions = rules, device.WhyNoFractions(o.GPU, v)
		if !possible {
			o.HeldShares = nil
		}
	}
	return shared
}

// tellShares says where people look what cannot be offered in shares. It is settled if no claim
// holds shares that are offered no more.
func (d *Driver) tellShares(offerings []device.Offering, shapes []device.Shape, f Features) (settled bool) {
	_, notShared := d.shareRules(f)
	now := toldShares{
		notShared: notShared, noFractions: describe(device.NotInFractions(offerings)), ending: strings.Join(ending(shapes), ", "),
	}
	d.metrics.Shares(countShares(shapes))
	d.fractions.Store(slices.ContainsFunc(shapes, inFractions))
	if now.notShared != "" && now.notShared != d.toldShares.notShared {
		d.events.warn("SharesNotOffered", "No device is offered in shares: "+now.notShared)
	}
	if now.noFractions != "" && now.noFractions != d.toldShares.noFractions {
		d.events.warn("FractionsNotOffered", "Not offered in fractions: "+now.noFractions)
	}
	if now.ending != "" && now.ending != d.toldShares.ending {
		d.events.warn("SharesEnding", "Claims hold shares that are not offered so any more: nobody gets another one of "+now.ending+
			", and what is configured now holds when the last of them has been given back")
	}
	d.toldShares = now
	return now.ending == ""
}

func inFractions(s device.Shape) bool {
	shared, is := s.(device.Shared)
	return is && shared.InFractions()
}

// ending are the devices that are there for those alone who hold shares of them.
func ending(shapes []device.Shape) []string {
	var names []string
	for _, s := range shapes {
		if shared, is := s.(device.Shared); is && shared.Ending() {
			names = append(names, s.Name())
		}
	}
	return names
}

// shareRules are those that the configuration has, on a cluster that can count what is shared. notShared says what else it lacks, for people to read.
func (d *Driver) shareRules(f Features) (_ device.ShareRules, notShared string) {
	if !d.shares.Any() {
		return device.ShareRules{}, ""
	}
	if why := device.WhyNotShared(f.PartitionedDevices, f.ConsumableCapacity); why != "" {
		return device.ShareRules{}, why
	}
	return d.shares, ""
}

// countShares is how many devices that several claims may hold are among the shapes, by type.
func countShares(shapes []device.Shape) map[string]int {
	byType := map[string]int{}
	for _, s := range shapes {
		if name, ok := device.ParseName(s.Name()); ok && name.Share {
			byType[typeOf(name)]++
		}
	}
	return byType
}

// typeOf is the attribute type of a device.
func typeOf(name device.Name) string {
	kind := "gpu"
	if name.Partition != nil {
		kind = "mig"
	}
	if name.Share {
		kind += "-share"
	}
	return kind
}

// countDaemons shows the daemons in the metrics. Without a supervisor there are none.
func (d *Driver) countDaemons(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, mpsTimeout)
	defer cancel()
	all, err := d.supervisor.List(ctx)
	absent := new(mps.NotRunningError)
	if err != nil && !errors.As(err, &absent) {
		klog.FromContext(ctx).Error(err, "Could not look which MPS daemons there are")
		return
	}
	d.missSupervisor(err, time.Now())
	now := make([]metrics.MPSDaemon, len(all))
	for i, s := range all {
		now[i] = metrics.MPSDaemon{ID: s.Daemon.ID, State: string(s.State), Restarts: s.Restarts}
	}
	d.metrics.MPS(now)
}

// missSupervisor says where people look, once, that fractions are offered which cannot be prepared.
func (d *Driver) missSupervisor(absent error, now time.Time) {
	switch {
	case absent == nil || !d.fractions.Load():
		d.absentSince = time.Time{}
	case d.absentSince.IsZero():
		d.absentSince = now
	case now.Sub(d.absentSince) > absentFor && !d.absentTold:
		d.absentTold = true
		d.events.warn("MPSNotRunning", "Fractions are offered, and claims for them cannot be prepared: "+absent.Error())
	}
	if absent == nil {
		d.absentTold = false
	}
}

// endDaemons ends all daemons of a node on which no claim is held, and removes what they had on the disk. The supervisor may have gone first.
func (d *Driver) endDaemons(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, mpsTimeout)
	defer cancel()
	all, err := d.supervisor.List(ctx)
	if absent := new(mps.NotRunningError); errors.As(err, &absent) {
		err = nil
	}
	for _, s := range all {
		err = errors.Join(err, d.supervisor.Stop(ctx, s.Daemon.ID))
	}
	if err != nil {
		return err
	}
	return supervisor.RemoveAll(MPSPaths(d.cfg))
}

// shareTotals is what claims can hold together of a device, as it is offered. A rule for the GPU at a
// place counts those that are offered, of which the hardware may not show all.
func (d *Driver) shareTotals(of device.GPU, n device.Name) map[string]resource.Quantity {
	place := 0
	for _, g := range d.publishable().Snapshot().Node.GPUs {
		if g.PCIAddress < of.PCIAddress {
			place++
		}
	}
	return d.shares.Totals(of, place, n)
}

// publishable is the inventory that the slices are made of.
func (d *Driver) publishable() inventorySource { return withheld{d.offered(), d.before} }
