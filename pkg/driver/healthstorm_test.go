package driver

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// TestStorms has every XID that there is, and some that there are not, come on sixteen GPUs at once, in any order. They are in two slices.
func TestStorms(t *testing.T) {
	const gpus, ailing, codes, rounds = 70, 16, 180, 6
	n := newAiling(t)
	address := func(i int) device.PCIAddress { return device.PCIAddress(fmt.Sprintf("0001:%02x:00.0", i)) }
	ill := func(i int) device.PCIAddress { return address(gpus - 1 - i*(gpus/ailing)) } // the first ones are in the second slice
	n.say("many", func() (nvidia.Node, error) {
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
	eventually(t, "all are published", func() bool { return len(published(t, n.client)) == gpus })
	generation := mustList(t, n.client)[0].Spec.Pool.Generation
	for _, i := range []int{0, ailing - 1} {
		name := fmt.Sprintf("held-%d", i)
		claim := n.claim(t, name, ill(i).WholeName())
		n.reserve(t, name, "pod-"+name)
		if msg := n.prepare(t, claim).GetError(); msg != "" {
			t.Fatal(msg)
		}
	}

	n.client.ClearActions()
	began := time.Now()
	for range rounds {
		for _, k := range rand.Perm(ailing * codes) {
			n.xid(ill(k%ailing), uint64(k/ailing+1))
		}
	}
	t.Logf("%d events in %s", rounds*ailing*codes, time.Since(began))
	eventually(t, "every GPU has the taint that it must have", func() bool {
		all := n.taints(t)
		for i := range ailing {
			if !strings.Contains(all[ill(i).WholeName()], "gpu.nvidia.com/xid=") {
				return false
			}
		}
		return true
	})
	for _, pod := range []string{"pod-held-0", fmt.Sprintf("pod-held-%d", ailing-1)} {
		eventually(t, "the Pod is told", func() bool { return n.hasEvent(t, "Pod", pod, "GPUUnhealthy", "XID") })
	}
	// The last word of a storm is told before what is said after it.
	n.change(t, nil, map[string]string{releaseAnnotation: "true"})
	eventually(t, "what has nothing to do with it is told as well", func() bool { return n.hasEvent(t, "Node", "node", "DriverReleased", "") })

	// A flush comes ten times a second at most, and of one GPU it has an Event for each reason at most.
	flushes := int(time.Since(began)/healthPause) + 1
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
				events[e.InvolvedObject.Kind+" "+e.Annotations[gpuAnnotation]]++
			}
		}
	}
	t.Logf("%d writes of slices, %d reads of claims, events: %v", slices, reads, events)
	if slices > 30 || mustList(t, n.client)[0].Spec.Pool.Generation != generation {
		t.Errorf("%d events are %d writes of slices", rounds*ailing*codes, slices)
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

func TestNoticesOfOneGPUAreOne(t *testing.T) {
	var n notices
	change := func(a device.PCIAddress) health.Change { return health.Change{Card: device.Card{PCIAddress: a}} }
	for i := range 5 {
		n.add(change("0000:1b:00.0"), corev1.EventTypeWarning, "GPUUnhealthy", fmt.Sprintf("XID %d", i))
		n.add(change("0000:43:00.0"), corev1.EventTypeWarning, "GPUUnhealthy", fmt.Sprintf("XID %d", i))
	}
	n.add(change("0000:1b:00.0"), corev1.EventTypeWarning, "GPUDegraded", "a little")
	if len(n) != 3 || n[0].String() != "XID 0; XID 1; XID 2; and 2 more, which are in the plugin's log" || n[2].String() != "a little" {
		t.Errorf("%v", n)
	}
}

func TestWhatWaitsToBeToldIsBounded(t *testing.T) {
	var told healthTold
	state := func(s health.State, count uint64) health.Change {
		return health.Change{Finding: health.Finding{State: s, Count: count}}
	}
	told.add(state(health.Lost, 0))
	for i := range uint64(2 * healthEventsMost) {
		told.add(state(health.Healthy, i))
	}
	left := told.take()
	if len(left) != healthEventsMost || left[0].Finding.State != health.Lost || left[1].Finding.Count != healthEventsMost+1 {
		t.Errorf("%d: %+v", len(left), left[:2])
	}
}
