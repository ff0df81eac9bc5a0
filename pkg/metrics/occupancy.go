package metrics

import (
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// Occupancy is what a node has, who has it, and what is free. Each entry is one time series.
type Occupancy struct {
	// Node is the node's name. Devices and Allocations have it as a label, because other exporters'
	// metrics are joined with them.
	Node        string
	Devices     []Device
	Allocations []Allocation
	Shares      []Share
	// FreeGPUs is the number of GPUs that a claim can get whole.
	FreeGPUs int
	// Partitions has an entry for each GPU that is offered in partitions.
	Partitions []FreePartition
}

// Device is a whole GPU or a MIG device that exists on the hardware.
type Device struct {
	Name, UUID, PCIBusID, Model string
	// Profile and Instance, the ID of the GPU instance, are empty for a whole GPU.
	Profile, Instance string
	// ParentUUID is the GPU's UUID, also for a whole GPU.
	ParentUUID string
}

// Allocation is a device of a prepared claim. Equal entries become one time series, such as those
// of several shares of one device.
type Allocation struct {
	// Pod is the Pod that owns the claim. It is empty if no Pod does.
	Namespace, Claim, Pod string
	// Device is the allocated device. Of a share it has the name of the device that is shared.
	Device, UUID, ParentUUID, Instance string
	AdminAccess                        bool
}

// Share is one resource of a device that several claims can share: memory in bytes, cores in
// percent or shares.
type Share struct {
	Device, Resource string
	Capacity, Used   float64
}

// FreePartition is the largest partition of a GPU that a claim can get. Profile is empty and Bytes
// is 0 if there is none.
type FreePartition struct {
	GPU, Profile string
	Bytes        float64
}

// ReadOccupancy registers the metrics of the node's occupancy. Each scrape calls read. If ok is
// false, the scrape lacks these metrics.
func (m *Metrics) ReadOccupancy(read func() (_ Occupancy, ok bool)) {
	all := []*prometheus.Desc{deviceInfo, allocationInfo, shareCapacity, shareUsed, freeGPUs, freePartitionsOf}
	m.prefixed.MustRegister(collector{all, func(send sendFunc) {
		if now, ok := read(); ok {
			now.send(send)
		}
	}})
}

var (
	deviceInfo = prometheus.NewDesc("device_info", "Always 1, for each GPU and each MIG device that exists.",
		[]string{"node", "device", "uuid", "pci_bus_id", "model", "profile", "parent_uuid", "gi"}, nil)
	allocationInfo = prometheus.NewDesc("allocation_info", "Always 1, for each device of each prepared claim.",
		[]string{"node", "namespace", "claim", "pod", "device", "uuid", "parent_uuid", "gi", "admin_access"}, nil)
	shareCapacity = prometheus.NewDesc("share_capacity", "What the claims on a shared device can have in total: memory in bytes, "+
		"cores in percent, or shares.", []string{"device", "resource"}, nil)
	shareUsed = prometheus.NewDesc("share_used", "What the prepared claims on a shared device have in total, as gpu_dra_share_capacity.",
		[]string{"device", "resource"}, nil)
	freeGPUs         = prometheus.NewDesc("free_gpus", "GPUs that a claim can get whole now.", nil, nil)
	freePartitionsOf = prometheus.NewDesc("largest_free_profile_bytes", "Memory of the largest MIG device of a GPU that a claim can get "+
		"now. It is 0, without a profile, if there is none.", []string{"device", "profile"}, nil)
)

// collector sends metrics of these descriptions at each scrape.
type collector struct {
	descriptions []*prometheus.Desc
	collect      func(send sendFunc)
}

type sendFunc func(d *prometheus.Desc, value float64, labels ...string)

// Describe implements [prometheus.Collector].
func (c collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range c.descriptions {
		to <- d
	}
}

// Collect implements [prometheus.Collector].
func (c collector) Collect(to chan<- prometheus.Metric) {
	sent := map[string]bool{}
	c.collect(func(d *prometheus.Desc, value float64, labels ...string) {
		for i, l := range labels {
			labels[i] = strings.ToValidUTF8(l, "?") // some come from the hardware
		}
		// A second series with the same labels would fail the whole scrape.
		key := d.String() + strings.Join(labels, "\xff")
		if !sent[key] {
			to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
		}
		sent[key] = true
	})
}

func (now Occupancy) send(send sendFunc) {
	for _, d := range now.Devices {
		send(deviceInfo, 1, now.Node, d.Name, d.UUID, d.PCIBusID, d.Model, d.Profile, d.ParentUUID, d.Instance)
	}
	for _, a := range now.Allocations {
		send(allocationInfo, 1, now.Node, a.Namespace, a.Claim, a.Pod, a.Device, a.UUID, a.ParentUUID, a.Instance,
			strconv.FormatBool(a.AdminAccess))
	}
	for _, s := range now.Shares {
		send(shareCapacity, s.Capacity, s.Device, s.Resource)
		send(shareUsed, s.Used, s.Device, s.Resource)
	}
	send(freeGPUs, float64(now.FreeGPUs))
	for _, p := range now.Partitions {
		send(freePartitionsOf, p.Bytes, p.GPU, p.Profile)
	}
}
