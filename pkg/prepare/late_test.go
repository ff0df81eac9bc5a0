package prepare

import (
	"context"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// forPods is the claim reserved for these Pods alone.
func forPods(c *resourceapi.ResourceClaim, pods ...string) *resourceapi.ResourceClaim {
	c.Status.ReservedFor = nil
	for _, pod := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod, UID: types.UID(pod)})
	}
	return c
}

func TestAClaimThatNoPodMayUseIsNotPrepared(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	if _, err := p.Prepare(t.Context(), forPods(newClaim("c", allocated("r", gpu0)))); CauseOf(err) != CauseClaim || !strings.Contains(err.Error(), "not reserved for any Pod") {
		t.Error(err)
	}
	clean(t, w)
}

// The kubelet's call was read before the claim was given back, and comes to its turn, without a wait, after that.
func TestAPrepareThatAnUnprepareHasOvertakenReadsTheClaimAgain(t *testing.T) {
	for name, c := range map[string]struct {
		now  []string
		want bool
	}{
		"its Pod has gone":              {nil, false},
		"its next Pod waits":            {[]string{"next"}, true},
		"its Pod is there all the time": {[]string{"pod-c"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			p := w.plugin(t)
			given := map[types.UID]bool{}
			p.GivenBack = func(uid types.UID) { given[uid] = true }
			p.Overtaken = func(_ context.Context, uid types.UID) bool { return given[uid] }
			before := newClaim("c", allocated("r", gpu0))
			mustPrepare(t, p, before)
			mustUnprepare(t, p, before.UID)
			w.reread = func() (*resourceapi.ResourceClaim, error) {
				return forPods(newClaim("c", allocated("r", gpu0)), c.now...), nil
			}
			_, err := p.Prepare(t.Context(), before)
			if c.want != (err == nil) {
				t.Errorf("prepared, %v; want %v", err, c.want)
			}
			if !c.want {
				clean(t, w)
			}
		})
	}
}

func TestACallThatTheKubeletHasGivenUpIsNotBegun(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	ctx, cancel := context.WithCancel(t.Context())
	p.Overtaken = func(context.Context, types.UID) bool { t.Error("asked for more than is needed"); return false }
	p.Hardware = during{w, cancel}
	if _, err := p.Prepare(ctx, newClaim("c", allocated("r", gpu0))); CauseOf(err) != CauseCanceled {
		t.Error(err)
	}
	clean(t, w)
}

// during does something each time when the node is looked at.
type during struct {
	Hardware
	do func()
}

func (d during) Snapshot() inventory.Snapshot {
	d.do()
	return d.Hardware.Snapshot()
}
