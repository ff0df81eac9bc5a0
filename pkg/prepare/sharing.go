package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// sharing lists the GPU settings and MPS daemons that a claim needs, and the devices whose
// containers use an MPS daemon. The claim's configuration asks for time slices and MPS, and the
// capacities of its shares give the limits.
type sharing struct {
	// shared has the settings and daemons in the order in which they are applied.
	shared  []*steps.Shared
	clients []steps.MPSClient
}

// add adds a step in a form that claims can share, unless there is one with the same key. The
// parameter "of" names the GPU, partition or daemon that the step belongs to.
func (s *sharing) add(of string, gpus []string, step steps.Sharable) error {
	shared, err := steps.NewShared(of, gpus, step)
	if err != nil || slices.ContainsFunc(s.shared, func(there *steps.Shared) bool { return there.Key == shared.Key }) {
		return err
	}
	s.shared = append(s.shared, shared)
	steps.SortShared(s.shared)
	return nil
}

// mpsGroup is the set of a claim's devices for which one configuration entry asks for MPS. One MPS
// daemon serves them.
type mpsGroup struct {
	number  int
	config  *v1beta1.MPSConfig
	devices []int
}

// planSharing finds the settings, MPS daemons and MPS clients that the claim's results need.
// pl.requests has an entry for each result.
func (p *Preparer) planSharing(pl *plan, results []claim.Result) (s sharing, _ error) {
	var groups []*mpsGroup
	var fractions []int
	for i, r := range results {
		strategy, config := r.Config.SharingStrategy(), mpsConfig(r.Config)
		req := pl.requests[i]
		if err := checkSharing(r, req.name, strategy, config); err != nil {
			return s, err
		}
		if pl.record.Devices[i].Fraction {
			fractions = append(fractions, i)
			continue
		}
		switch {
		case strategy == v1beta1.SharingTimeSlicing && req.name.Partition == nil:
			step := steps.NewTimeSlice(req.name.GPU, req.gpu.Card(), timeSlice(r.Config))
			if err := s.add(req.name.GPU, []string{req.name.GPU}, step); err != nil {
				return s, err
			}
		case strategy == v1beta1.SharingMPS:
			at := slices.IndexFunc(groups, func(g *mpsGroup) bool { return g.number == r.Group })
			if at < 0 {
				at = len(groups)
				groups = append(groups, &mpsGroup{number: r.Group, config: config})
			}
			groups[at].devices = append(groups[at].devices, i)
		}
	}
	if len(fractions) > 0 && len(groups) > 0 {
		return s, fmt.Errorf("requests %s and %s: a fraction and strategy %s in one claim need two MPS daemons, but a process can use only "+
			"one: make them two claims",
			results[fractions[0]].Request, results[groups[0].devices[0]].Request, v1beta1.SharingMPS)
	}
	for _, g := range groups {
		if err := checkSinglePartition(pl, results, g); err != nil {
			return s, err
		}
		if err := s.addGroupDaemon(pl, g, fmt.Sprintf("%s-%d", pl.record.ClaimUID, g.number)); err != nil {
			return s, err
		}
	}
	if len(fractions) > 0 {
		if err := checkOnlyFractions(pl, results, fractions); err != nil {
			return s, err
		}
		if err := s.addFractionDaemon(pl, results, fractions); err != nil {
			return s, err
		}
	}
	if p.opts.MPSDisabled && len(s.clients) > 0 {
		return s, fmt.Errorf("request %s: MPS is switched off in this cluster: set mps.enabled=true in the chart's values",
			results[s.clients[0].Devices[0]].Request)
	}
	return s, nil
}

// checkOnlyFractions refuses a claim that has both limited shares and other devices, because a
// process that uses a limited share sees only the devices of its MPS daemon. Devices with admin
// access are allowed, because they are not for computing.
func checkOnlyFractions(pl *plan, results []claim.Result, fractions []int) error {
	for _, d := range pl.record.Devices {
		if !d.Fraction && !d.AdminAccess {
			return fmt.Errorf("requests %s and %s: with a fraction (%s), a container's processes cannot see device %s, because MPS shows them "+
				"only the fraction's device: "+
				"make them two claims, for two containers",
				results[fractions[0]].Request, d.Request, pl.record.Devices[fractions[0]].Device, d.Device)
		}
	}
	return nil
}

// checkSinglePartition refuses a configuration that applies MPS to several MIG devices together. A
// CUDA process uses only one MIG device, however many it sees, and so does the MPS server for all
// its clients. Source: https://docs.nvidia.com/datacenter/tesla/mig-user-guide/index.html, on
// CUDA_VISIBLE_DEVICES and on MPS within MIG.
func checkSinglePartition(pl *plan, results []claim.Result, g *mpsGroup) error {
	if first := g.devices[0]; len(g.devices) > 1 && pl.requests[first].name.Partition != nil {
		second := g.devices[1]
		return fmt.Errorf("requests %s and %s: sharing.strategy %s: MIG devices %s and %s use one configuration and so one MPS daemon, which "+
			"can serve only one MIG device: "+
			"write a configuration for each request (config[].requests), and replace a request with a count by several requests of one device each",
			results[first].Request, results[second].Request, v1beta1.SharingMPS, pl.requests[first].name, pl.requests[second].name)
	}
	return nil
}

// timeSlice returns the time slice that a configuration with strategy TimeSlicing asks for.
func timeSlice(c v1beta1.Config) device.TimeSlice {
	if gpu, ok := c.(*v1beta1.GpuConfig); ok && gpu.Sharing.TimeSlicing != nil {
		return steps.TimeSliceIntervals[gpu.Sharing.TimeSlicing.Interval]
	}
	return device.TimeSliceDefault
}

// mpsConfig returns the MPS settings of a configuration, or nil.
func mpsConfig(c v1beta1.Config) *v1beta1.MPSConfig {
	switch c := c.(type) {
	case *v1beta1.GpuConfig:
		if c.Sharing != nil {
			return c.Sharing.MPS
		}
	case *v1beta1.MigDeviceConfig:
		if c.Sharing != nil {
			return c.Sharing.MPS
		}
	}
	return nil
}

// addExclusiveMode adds a step that sets the GPU's compute mode to exclusive process, which MPS
// needs. It adds none for a partition, because a GPU in MIG mode does not have this compute mode.
func (s *sharing) addExclusiveMode(req deviceRequest) (err error) {
	if req.name.Partition == nil {
		err = s.add(req.name.GPU, []string{req.name.GPU}, steps.NewExclusiveMode(req.name.GPU, req.gpu.Card()))
	}
	return err
}

// addGroupDaemon adds an MPS daemon for the devices of group g.
func (s *sharing) addGroupDaemon(pl *plan, g *mpsGroup, id string) (err error) {
	d := &steps.MPSDaemon{ID: id, MultiUser: g.config.MultiUser}
	if g.config.DefaultActiveThreadPercentage != nil {
		d.ThreadPercentage = *g.config.DefaultActiveThreadPercentage
	}
	if g.config.DefaultPinnedDeviceMemoryLimit != nil {
		d.Memory = mebibytes(g.config.DefaultPinnedDeviceMemoryLimit.Quantity)
	}
	for key, limit := range g.config.DefaultPerDevicePinnedMemoryLimit {
		if d.PerDevice == nil {
			d.PerDevice = map[string]uint64{}
		}
		d.PerDevice[key] = mebibytes(limit.Quantity)
	}
	var gpus, uuids []string
	for _, i := range g.devices {
		req := pl.requests[i]
		d.Devices = append(d.Devices, req.name.String())
		gpus = append(gpus, req.name.GPU)
		if req.name.Partition == nil {
			uuids = append(uuids, req.gpu.UUID)
		}
		if err := s.addExclusiveMode(req); err != nil {
			return err
		}
	}
	if len(uuids) == len(d.Devices) { // all UUIDs are known, so refuse a wrong configuration before any change
		known := *d
		known.UUIDs = uuids
		if _, err := known.Daemon(); err != nil {
			return err
		}
	}
	slices.Sort(gpus)
	err = s.add(id, slices.Compact(gpus), d)
	s.clients = append(s.clients, steps.MPSClient{Daemon: id, Devices: g.devices})
	return err
}

// addFractionDaemon adds the MPS daemon for a claim with limited shares of one device, and limits
// the claim's processes to the sum of these shares. All claims with limited shares of the device
// use the same daemon.
func (s *sharing) addFractionDaemon(pl *plan, results []claim.Result, fractions []int) (err error) {
	c := steps.MPSClient{Daemon: pl.requests[fractions[0]].name.String(), Devices: fractions}
	for _, i := range fractions {
		req, first := pl.requests[i], pl.requests[fractions[0]]
		if req.name.String() != first.name.String() {
			return fmt.Errorf("requests %s and %s: fractions of two devices (%s and %s) in one claim need two MPS daemons, but a process can use "+
				"only one: make them two claims",
				results[fractions[0]].Request, results[i].Request, first.name, req.name)
		}
		c.Memory += mebibytes(results[i].Capacity[device.CapacityMemory])
		c.Threads = min(c.Threads+int(clampValue(results[i].Capacity[device.CapacityCores], 100)), 100)
	}
	req := pl.requests[fractions[0]]
	if device.ContainerLimits(req.gpu, req.name) {
		c.Whole = req.gpu.UUID
	}
	if err := s.addExclusiveMode(req); err != nil {
		return err
	}
	err = s.add(c.Daemon, []string{req.name.GPU},
		&steps.MPSDaemon{ID: c.Daemon, Devices: []string{req.name.Unshared().String()}, MultiUser: true})
	s.clients = append(s.clients, c)
	return err
}

// mebibytes converts an amount to MiB, the unit of MPS, and rounds down.
func mebibytes(q resource.Quantity) uint64 { return uint64(max(clampValue(q, 1<<50), 0)) >> 20 }

// clampValue returns the value of q, but at least 0 and at most the limit most. Otherwise a huge
// value could overflow and become negative or unlimited.
func clampValue(q resource.Quantity, most int64) int64 {
	if q.CmpInt64(most) > 0 {
		return most
	}
	return max(q.Value(), 0)
}

// checkSupervisor returns an error if the MPS supervisor, which the claim needs, does not run.
// Prepare calls it before it changes anything.
func (p *Preparer) checkSupervisor(ctx context.Context) error {
	_, err := p.node.MPS.List(ctx)
	if absent := new(mps.NotRunningError); errors.As(err, &absent) {
		return cause.Errorf(cause.NotReady, "the claim needs MPS: %w", err)
	}
	return nil // Start will report any other error
}

// addClientEdits adds to the edits of a device what a client of an MPS daemon needs. minor is that
// of the device's GPU.
func (p *Preparer) addClientEdits(edits specs.ContainerEdits, c steps.MPSClient, minor int) specs.ContainerEdits {
	edits = mergeEdits(edits, p.opts.Edits.MPSClient(c.Daemon))
	edits.Env = append(edits.Env, mps.Limits(c.Memory, c.Threads)...)
	if c.Whole != "" {
		edits = mergeEdits(edits, p.opts.Edits.MemoryLimit(c.Whole, minor, c.Memory))
	}
	return edits
}

// mergeEdits returns a with the environment, device nodes, groups, mounts and hooks of b added.
func mergeEdits(a, b specs.ContainerEdits) specs.ContainerEdits {
	a.Env = slices.Concat(a.Env, b.Env)
	a.DeviceNodes = slices.Concat(a.DeviceNodes, b.DeviceNodes)
	a.AdditionalGIDs = slices.Concat(a.AdditionalGIDs, b.AdditionalGIDs)
	a.Mounts = slices.Concat(a.Mounts, b.Mounts)
	a.Hooks = slices.Concat(a.Hooks, b.Hooks)
	return a
}
