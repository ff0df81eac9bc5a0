package driver

import (
	"context"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// PrepareResourceClaims prepares the claims of one Pod side by side: a claim that waits for its GPU does not hold up the others.
// One claim's failure is that claim's answer.
func (d *Driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := make([]kubeletplugin.PrepareResult, len(claims))
	var wg sync.WaitGroup
	for i, c := range claims {
		wg.Go(func() { results[i] = d.prepare(ctx, c) })
	}
	wg.Wait()
	answer := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for i, c := range claims {
		answer[c.UID] = results[i]
	}
	return answer, nil
}

func (d *Driver) prepare(ctx context.Context, c *resourceapi.ResourceClaim) kubeletplugin.PrepareResult {
	logger := klog.FromContext(ctx).WithValues("claim", klog.KObj(c), "claimUID", c.UID)
	start := time.Now()
	var devices []kubeletplugin.Device
	hint := ""
	err := d.refuseForeign(c.UID, c.Namespace+"/"+c.Name)
	if err == nil {
		err = d.refuseLost(c)
	}
	if err == nil {
		done, _ := d.release.Use() // Prepare refuses while the node is not ready
		defer done()
		hint = d.oversizedHint(c)
		devices, err = d.preparer.Prepare(klog.NewContext(ctx, logger), c)
	}
	took := time.Since(start)
	d.metrics.Request(metrics.Prepare, took, string(prepare.CauseOf(err)))
	if err != nil {
		logger.Error(err, "Could not prepare the claim")
		return kubeletplugin.PrepareResult{Err: err}
	}
	d.lost.End(c.UID)
	d.status.Prepared(ctx, c, d.given(c.UID))
	if hint != "" {
		d.events.normalClaim(c, "WholeGPUHeld", hint)
	}
	logger.Info("Prepared the claim", "devices", names(devices), "took", took)
	return kubeletplugin.PrepareResult{Devices: devices}
}

// UnprepareResourceClaims gives the claims' devices back. A claim that was never prepared here is given back already.
func (d *Driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	errs := make([]error, len(claims))
	var wg sync.WaitGroup
	for i, c := range claims {
		wg.Go(func() { errs[i] = d.unprepare(ctx, c) })
	}
	wg.Wait()
	answer := make(map[types.UID]error, len(claims))
	for i, c := range claims {
		answer[c.UID] = errs[i]
	}
	return answer, nil
}

func (d *Driver) unprepare(ctx context.Context, c kubeletplugin.NamespacedObject) error {
	logger := klog.FromContext(ctx).WithValues("claim", c.NamespacedName, "claimUID", c.UID)
	start := time.Now()
	err := d.preparer.Unprepare(klog.NewContext(ctx, logger), c.UID)
	if err == nil {
		err = d.endForeign(klog.NewContext(ctx, logger), c.UID)
	}
	took := time.Since(start)
	d.metrics.Request(metrics.Unprepare, took, string(prepare.CauseOf(err)))
	if err != nil {
		logger.Error(err, "Could not unprepare the claim")
		d.events.warnClaim(c, "UnprepareFailed", err.Error())
		return err
	}
	if len(d.layouts.HandedOver()) > 0 || len(d.layouts.Uncut()) > 0 {
		wake(d.toReconcile) // the claim may have used an instance, or a MIG mode, that is waited for
	}
	if d.unsettled.Load() {
		wake(d.toPublisher)
	}
	logger.Info("Unprepared the claim", "took", took)
	return nil
}

func names(devices []kubeletplugin.Device) []string {
	out := make([]string, len(devices))
	for i, d := range devices {
		out[i] = d.DeviceName
	}
	return out
}

// givenBack is told of a claim that was given back before its lock is let go of: what a later Prepare of it says must outlive what is forgotten here.
func (d *Driver) givenBack(uid types.UID) {
	d.calls.GivenBack(uid)
	d.lost.End(uid)
	d.status.Forget(uid)
}
