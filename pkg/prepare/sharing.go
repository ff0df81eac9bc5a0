package prepare

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// mpsClient is what containers that use some of the claim's devices get to know of a daemon.
type mpsClient struct {
	Daemon string `json:"daemon"`
	// Devices are indexes into the record's.
	Devices []int `json:"devices"`
	// Memory in MiB and Threads in percent hold for each process in such a container; zero is no limit.
	Memory  uint64 `json:"memory,omitempty"`
	Threads int    `json:"threads,omitempty"`
	// Whole is the GPU of which such a container as a whole gets no more than Memory. It is empty where only processes are limited.
	Whole string `json:"whole,omitempty"`
}

// clientEdits are those of a device of the claim, by its index.
func (p *Preparer) clientEdits(clients []mpsClient, index int) []specs.ContainerEdits {
	var edits []specs.ContainerEdits
	for _, c := range clients {
		if slices.Contains(c.Devices, index) {
			e := p.MPSEdits(c.Daemon)
			e.Env = append(slices.Clone(e.Env), mps.Limits(c.Memory, c.Threads)...)
			if c.Whole != "" {
				e = joined(e, p.LimitEdits(c.Whole, c.Memory))
			}
			edits = append(edits, e)
		}
	}
	return edits
}

// sharing is what a claim asks for beyond its devices: of its configuration by time slices and MPS, and of shares that have limits.
type sharing struct {
	slices  []*shared
	modes   []*shared
	daemons []*shared
	clients []mpsClient
}

// steps are in the order in which they are applied.
func (s *sharing) steps() []*shared { return slices.Concat(s.modes, s.slices, s.daemons) }

// add leaves out what is there already.
func add(steps []*shared, of string, gpus []string, step sharable) ([]*shared, error) {
	s, err := share(of, gpus, step)
	if err != nil || slices.ContainsFunc(steps, func(there *shared) bool { return there.Key == s.Key }) {
		return steps, err
	}
	return append(steps, s), nil
}

// group are the results that take one configuration with strategy MPS.
type group struct {
	number  int
	config  *v1beta1.MPSConfig
	devices []int
}

// sharing settles what the results ask for. The plan has a want for each.
func (p *Preparer) sharing(uid types.UID, w *plan, results []claim.Result) (*sharing, error) {
	s := &sharing{}
	var groups []*group
	var fractions []int
	for i, r := range results {
		strategy, interval, config := asked(r.Config)
		t := w.wants[i]
		if err := allowed(r, t.name, strategy, config); err != nil {
			return nil, err
		}
		if w.record.Devices[i].Fraction {
			fractions = append(fractions, i)
			continue
		}
		switch {
		case strategy == v1beta1.SharingTimeSlicing && t.name.Partition == nil:
			var err error
			if s.slices, err = add(s.slices, t.name.GPU, []string{t.name.GPU}, &timeSlice{setting: setting[device.TimeSlice]{GPU: t.name.GPU, Card: t.gpu.Card()}, Want: intervals[interval]}); err != nil {
				return nil, err
			}
		case strategy == v1beta1.SharingMPS:
			at := slices.IndexFunc(groups, func(g *group) bool { return g.number == r.Group })
			if at < 0 {
				at = len(groups)
				groups = append(groups, &group{number: r.Group, config: config})
			}
			groups[at].devices = append(groups[at].devices, i)
		}
	}
	if len(fractions) > 0 && len(groups) > 0 {
		return nil, fmt.Errorf("requests %s and %s: a fraction and strategy %s in one claim would be two MPS daemons, and a process knows one: make them two claims",
			results[fractions[0]].Request, results[groups[0].devices[0]].Request, v1beta1.SharingMPS)
	}
	if err := onlyFractions(w, results, fractions); err != nil {
		return nil, err
	}
	for _, g := range groups {
		if err := onePartition(w, results, g); err != nil {
			return nil, err
		}
		if err := s.group(w, g, fmt.Sprintf("%s-%d", uid, g.number)); err != nil {
			return nil, err
		}
	}
	if err := s.fractions(w, results, fractions); err != nil {
		return nil, err
	}
	if p.NoMPS && len(s.clients) > 0 {
		return nil, fmt.Errorf("request %s: MPS is switched off in this cluster: set mps.enabled=true in the chart's values",
			results[s.clients[0].Devices[0]].Request)
	}
	return s, nil
}

// onlyFractions refuses what a container with the whole claim would not see: a process that is a client of a daemon has the daemon's devices alone.
// Admin access is not for processes that compute.
func onlyFractions(w *plan, results []claim.Result, fractions []int) error {
	for _, d := range w.record.Devices {
		if len(fractions) > 0 && !d.Fraction && !d.AdminAccess {
			return fmt.Errorf("requests %s and %s: beside a fraction (%s) the processes of a container would not see device %s, because MPS shows them the fraction's device alone: make them two claims, for two containers",
				results[fractions[0]].Request, d.Request, w.record.Devices[fractions[0]].Device, d.Device)
		}
	}
	return nil
}

// onePartition refuses a daemon over several MIG devices: a CUDA process uses one of them, whatever it is shown, and so does the server of MPS, for all of its
// clients (https://docs.nvidia.com/datacenter/tesla/mig-user-guide/index.html, on CUDA_VISIBLE_DEVICES, and on MPS within MIG).
func onePartition(w *plan, results []claim.Result, g *group) error {
	if first := g.devices[0]; len(g.devices) > 1 && w.wants[first].name.Partition != nil {
		second := g.devices[1]
		return fmt.Errorf("requests %s and %s: sharing.strategy %s: MIG devices %s and %s take one configuration, and so would be one MPS daemon's, which can serve one MIG device: write a configuration for each request (config[].requests), and where one request has a count, several requests of one device each",
			results[first].Request, results[second].Request, v1beta1.SharingMPS, w.wants[first].name, w.wants[second].name)
	}
	return nil
}

// asked is the strategy of a configuration, with what goes with it.
func asked(c v1beta1.Config) (v1beta1.SharingStrategy, v1beta1.TimeSliceInterval, *v1beta1.MPSConfig) {
	switch c := c.(type) {
	case *v1beta1.GpuConfig:
		if c.Sharing == nil {
			return v1beta1.SharingNone, "", nil
		}
		interval := v1beta1.IntervalDefault
		if c.Sharing.TimeSlicing != nil {
			interval = c.Sharing.TimeSlicing.Interval
		}
		return c.Sharing.Strategy, interval, c.Sharing.MPS
	case *v1beta1.MigDeviceConfig:
		if c.Sharing != nil {
			return c.Sharing.Strategy, "", c.Sharing.MPS
		}
	}
	return v1beta1.SharingNone, "", nil
}

// exclusive adds the compute mode that MPS needs. It does not exist in MIG mode.
func (s *sharing) exclusive(t want) (err error) {
	if t.name.Partition == nil {
		s.modes, err = add(s.modes, t.name.GPU, []string{t.name.GPU}, &computeMode{setting[device.ComputeMode]{GPU: t.name.GPU, Card: t.gpu.Card()}})
	}
	return err
}

// group gives the devices of one configuration a daemon of their own.
func (s *sharing) group(w *plan, g *group, id string) (err error) {
	d := &mpsDaemon{ID: id, MultiUser: g.config.MultiUser}
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
		t := w.wants[i]
		d.Devices = append(d.Devices, t.name.String())
		gpus = append(gpus, t.name.GPU)
		if t.name.Partition == nil {
			uuids = append(uuids, t.gpu.UUID)
		}
		if err := s.exclusive(t); err != nil {
			return err
		}
	}
	if len(uuids) == len(d.Devices) { // What can be told before anything is done is told then.
		known := *d
		known.UUIDs = uuids
		if _, err := known.daemon(); err != nil {
			return err
		}
	}
	slices.Sort(gpus)
	s.daemons, err = add(s.daemons, id, slices.Compact(gpus), d)
	s.clients = append(s.clients, mpsClient{Daemon: id, Devices: g.devices})
	return err
}

// fractions holds the claim to the sum of its fractions. The daemon is that of the device, for all who hold a fraction of it.
func (s *sharing) fractions(w *plan, results []claim.Result, fractions []int) (err error) {
	if len(fractions) == 0 {
		return nil
	}
	c := mpsClient{Daemon: w.wants[fractions[0]].name.String(), Devices: fractions}
	for _, i := range fractions {
		t, first := w.wants[i], w.wants[fractions[0]]
		if t.name.String() != first.name.String() {
			return fmt.Errorf("requests %s and %s: fractions of two devices (%s and %s) in one claim would be two MPS daemons, and a process knows one: make them two claims",
				results[fractions[0]].Request, results[i].Request, first.name, t.name)
		}
		c.Memory += mebibytes(results[i].Capacity[device.CapacityMemory])
		c.Threads = min(c.Threads+int(bounded(results[i].Capacity[device.CapacityCores], 100)), 100)
	}
	t := w.wants[fractions[0]]
	if device.ContainerLimits(t.gpu, t.name) {
		c.Whole = t.gpu.UUID
	}
	if err := s.exclusive(t); err != nil {
		return err
	}
	s.daemons, err = add(s.daemons, c.Daemon, []string{t.name.GPU}, &mpsDaemon{ID: c.Daemon, Devices: []string{t.name.Unshared().String()}, MultiUser: true})
	s.clients = append(s.clients, c)
	return err
}

// mebibytes are whole ones: MPS counts in them.
func mebibytes(q resource.Quantity) uint64 { return uint64(max(bounded(q, 1<<50), 0)) >> 20 }

// bounded is the value, from 0 to most: one that no integer holds would come out as any other, and as no limit.
func bounded(q resource.Quantity, most int64) int64 {
	if q.CmpInt64(most) > 0 {
		return most
	}
	return max(q.Value(), 0)
}
