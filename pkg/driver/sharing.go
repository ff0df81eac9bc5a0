package driver

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/supervisor"
)

// mpsTimeout limits calls to the MPS supervisor outside Prepare and Unprepare.
const mpsTimeout = 5 * time.Second

// Supervisor starts and stops MPS control daemons. It runs in a Pod of its own.
type Supervisor interface {
	Start(ctx context.Context, d mps.Daemon) error
	Stop(ctx context.Context, id string) error
	List(ctx context.Context) ([]mps.Status, error)
}

var _ Supervisor = &mps.Client{}

// nodeSupervisor wraps the client of this node's MPS supervisor. Start measures how long daemons
// take to start. If the supervisor is gone, Stop removes the daemon's files itself, so that claims
// can be unprepared.
type nodeSupervisor struct {
	Supervisor
	paths   mps.Paths
	proc    string // the node's /proc
	metrics *metrics.Metrics
}

func (s nodeSupervisor) Start(ctx context.Context, d mps.Daemon) error {
	start := time.Now()
	err := s.Supervisor.Start(ctx, d)
	s.metrics.MPSStart(time.Since(start), err != nil)
	return err
}

func (s nodeSupervisor) Stop(ctx context.Context, id string) error {
	err := s.Supervisor.Stop(ctx, id)
	if absent := new(mps.NotRunningError); errors.As(err, &absent) {
		return supervisor.Forget(ctx, s.paths, s.proc, id)
	}
	return err
}

// withShares returns the offerings (devices to offer per GPU) with the configured share rules
// added, if a cluster with the features f supports them. v is the node's GPU driver.
func (d *Driver) withShares(offerings []device.Offering, v device.Driver, f Features) []device.Offering {
	rules, _ := d.shareRules(f)
	possible := device.SharingUnsupportedReason(f.PartitionedDevices, f.ConsumableCapacity) == ""
	shared := slices.Clone(offerings)
	for i := range shared {
		o := &shared[i]
		o.Shares, o.FractionsUnsupported = rules, device.FractionsUnsupportedReason(o.GPU, v)
		if !possible {
			o.HeldShares = nil
		}
	}
	return shared
}

// reportShares writes Events and metrics about devices that several claims can share. settled is
// false while claims have shares that the configuration no longer has, so the slices must be built
// again soon.
func (d *Driver) reportShares(offerings []device.Offering, shapes []device.Shape, f Features) (settled bool) {
	_, notShared := d.shareRules(f)
	noFractions := describeLimits(device.FractionRefusals(offerings))
	ending := strings.Join(endingShares(shapes), ", ")
	d.metrics.Shares(countShares(shapes))
	d.offersFractions.Store(slices.ContainsFunc(shapes, isFractional))
	d.events.WarnOnChange("SharesNotOffered", notShared, "Not offering shares: "+notShared)
	d.events.WarnOnChange("FractionsNotOffered", noFractions, "Not offering fractions: "+noFractions)
	d.events.WarnOnChange("SharesEnding", ending, "Claims hold shares that are no longer configured. No more shares are offered of "+
		ending+". The new configuration applies when the last of these claims ends")
	return ending == ""
}

func isFractional(s device.Shape) bool {
	shared, is := s.(device.Shared)
	return is && shared.InFractions()
}

// endingShares returns the names of shared devices that the configuration no longer has, but that
// are published as long as claims have shares of them.
func endingShares(shapes []device.Shape) []string {
	var names []string
	for _, s := range shapes {
		if shared, is := s.(device.Shared); is && shared.Withdrawn() {
			names = append(names, s.Name())
		}
	}
	return names
}

// shareRules returns the configured share rules. If the cluster does not support them, it returns
// no rules, and notShared says what the cluster lacks.
func (d *Driver) shareRules(f Features) (_ device.ShareRules, notShared string) {
	if !d.shares.Any() {
		return device.ShareRules{}, ""
	}
	if why := device.SharingUnsupportedReason(f.PartitionedDevices, f.ConsumableCapacity); why != "" {
		return device.ShareRules{}, why
	}
	return d.shares, ""
}

// countShares returns the number of shared devices by their attribute "type".
func countShares(shapes []device.Shape) map[string]int {
	byType := map[string]int{}
	for _, s := range shapes {
		if name, ok := device.ParseName(s.Name()); ok && name.Share {
			byType[name.Type()]++
		}
	}
	return byType
}

// StopAll stops all MPS daemons of the node and removes their files. The node must have no prepared
// claims. It also works if the supervisor is already gone.
func (s nodeSupervisor) StopAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, mpsTimeout)
	defer cancel()
	all, err := s.List(ctx)
	if absent := new(mps.NotRunningError); errors.As(err, &absent) {
		err = nil
	}
	for _, daemon := range all {
		err = errors.Join(err, s.Stop(ctx, daemon.Daemon.ID))
	}
	if err != nil {
		return err
	}
	return supervisor.RemoveAll(s.paths)
}

// shareTotals returns how much of each resource of the shared device n all claims together can get.
// The parameter of is the GPU of n. A share rule for the n-th GPU counts all offered GPUs,
// including those that the hardware no longer shows.
func (d *Driver) shareTotals(of device.GPU, n device.Name) map[string]resource.Quantity {
	place := 0
	for _, g := range d.node.View().Offered.Node.GPUs {
		if g.PCIAddress < of.PCIAddress {
			place++
		}
	}
	return d.shares.Totals(of, place, n)
}
