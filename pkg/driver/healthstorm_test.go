package driver

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
)

// All known XIDs and some unknown ones occur at once, in random order, on 16 of 70 GPUs. The number
// of writes and Events must stay limited.
func TestEventStormIsBounded(t *testing.T) {
	const gpus, failing, codes, rounds, graveXID = 70, 16, 180, 6, 79
	n := newHealthNode(t)
	address := func(i int) device.PCIAddress { return device.PCIAddress(fmt.Sprintf("0001:%02x:00.0", i)) }
	// failed returns the PCI address of the i-th failing GPU. The failing GPUs are in both slices, the
	// first ones in the second slice.
	failed := func(i int) device.PCIAddress { return address(gpus - 1 - i*(gpus/failing)) }
	n.setHardware("many", func() (nvidia.Node, error) {
		all, err := twoGPUs()
		pattern := all.GPUs[0]
		all.GPUs = nil
		for i := range gpus {
			g := pattern
			g.PCIAddress, g.UUID = address(i), "GPU-"+string(address(i))
			all.GPUs = append(all.GPUs, g)
		}
		return all, err
	})
	n.run(t)
	n.register(t)
	eventually(t, "all GPUs are published", func() bool { return len(published(t, n.client)) == gpus })
	generation := mustList(t, n.client)[0].Spec.Pool.Generation
	for _, i := range []int{0, failing - 1} {
		name := fmt.Sprintf("held-%d", i)
		claim := n.claim(t, name, failed(i).WholeName())
		n.reserve(t, name, "pod-"+name)
		if msg := n.prepare(t, claim).GetError(); msg != "" {
			t.Fatal(msg)
		}
	}

	n.client.ClearActions()
	began := time.Now()
	for range rounds {
		order := rand.Perm(failing * codes)
		// The GPUs that Pods have report a grave XID first. A later one may be one too many, and then no
		// Event names it.
		for first, k := range []int{(graveXID - 1) * failing, (graveXID-1)*failing + failing - 1} {
			at := slices.Index(order, k)
			order[first], order[at] = order[at], order[first]
		}
		for _, k := range order {
			n.xid(failed(k%failing), uint64(k/failing+1))
		}
	}
	t.Logf("%d events in %s", rounds*failing*codes, time.Since(began))
	eventually(t, "every GPU is tainted", func() bool {
		all := n.taints(t)
		for i := range failing {
			if !strings.Contains(all[failed(i).WholeName()], "gpu.nvidia.com/xid=") {
				return false
			}
		}
		return true
	})
	for _, pod := range []string{"pod-held-0", fmt.Sprintf("pod-held-%d", failing-1)} {
		eventually(t, "the Pod has an Event", func() bool { return n.hasEvent(t, "Pod", pod, "GPUUnhealthy", "XID") })
	}
	// Events are written in order. When the Event about this change of the Node is there, all Events
	// about the storm are written.
	n.editNode(t, nil, map[string]string{quiesce.Annotation: "true"})
	eventually(t, "an unrelated Event is written", func() bool { return n.hasEvent(t, "Node", "node", "DriverReleased", "") })

	// Each flush of the health loop writes at most one Event for each GPU and reason, and there are at
	// most ten flushes a second.
	flushes := int(time.Since(began)/(100*time.Millisecond)) + 1
	slices, events, reads := 0, map[string]int{}, 0
	for _, a := range n.client.Actions() {
		switch {
		case a.Matches("update", "resourceslices") || a.Matches("create", "resourceslices") || a.Matches("delete", "resourceslices"):
			slices++
		case a.Matches("get", "resourceclaims"):
			reads++
		}
		if written, ok := a.(interface{ GetObject() runtime.Object }); ok {
			if e, ok := written.GetObject().(*corev1.Event); ok {
				events[e.InvolvedObject.Kind+" "+e.Annotations[DriverName+"/gpu"]]++
			}
		}
	}
	t.Logf("%d writes of slices, %d reads of claims, events: %v", slices, reads, events)
	if slices > 30 || mustList(t, n.client)[0].Spec.Pool.Generation != generation {
		t.Errorf("%d events led to %d writes of slices", rounds*failing*codes, slices)
	}
	if reads > 2*flushes {
		t.Errorf("two claims were read %d times", reads)
	}
	for about, count := range events {
		if count > 25 {
			t.Errorf("there are %d Events about %s", count, about)
		}
	}
}
