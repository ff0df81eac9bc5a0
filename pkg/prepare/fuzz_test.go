// Whatever a claim or a record says, no call panics, hangs or leaves anything behind.

package prepare_test

import (
	"encoding/json"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// FuzzPrepare expects that Prepare of any claim succeeds or returns an error, and that after
// Unprepare no record, spec, MIG instance or daemon of the claim is left.
func FuzzPrepare(f *testing.F) {
	gpuConfig := `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":`
	for _, amount := range []string{"18Gi", "-1", "0", "8Ei", "1e30", "1m", "9223372036854775807", "-9223372036854775808"} {
		f.Add(share0, "memory", amount, "cores", amount, "share-1", "", false)
		f.Add(migShare0, "memory", amount, "cores", "25", "", "", false)
		f.Add(share0, "shares", amount, "memory", amount, "share-1", gpuConfig+slicing("Long")+"}", false)
	}
	f.Add(gpu0, "", "", "", "", "", gpuConfig+`{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"-1":"8Ei","99":"0"}}}}`,
		false)
	f.Add(gpu0, "", "", "", "", "",
		gpuConfig+`{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"-8Ei","defaultActiveThreadPercentage":-7}}}`, true)
	f.Add(small0, "", "", "", "", "../x", strings.Replace(gpuConfig, "GpuConfig", "MigDeviceConfig", 1)+byMPS+"}", false)
	f.Add(gpu0, "", "", "", "", "", gpuConfig+`{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"1e30"}}}`, false)
	f.Add("gpu-0000-1b-00-0-share-share", "memory", "1Gi", "", "", "a/b_c", `{`, true)
	f.Fuzz(func(t *testing.T, name, first, amount, second, another, shareID, config string, admin bool) {
		r := allocated("r", name)
		for capacity, text := range map[string]string{first: amount, second: another} {
			q, err := resource.ParseQuantity(text)
			if err != nil {
				continue
			}
			if r.ConsumedCapacity == nil {
				r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{}
			}
			r.ConsumedCapacity[resourceapi.QualifiedName(capacity)] = q
		}
		if shareID != "" {
			id := types.UID(shareID)
			r.ShareID = &id
		}
		r.AdminAccess = &admin
		again := r
		again.Request = "s"
		w := newWorldWithShares(t)
		h := w.hardware
		p := w.plugin(t)
		for _, c := range []*resourceapi.ResourceClaim{newClaim("c", r), newClaim("c", r, again)} {
			if config != "" {
				configured(c, config)
			}
			_, err := p.Prepare(t.Context(), c)
			if err == nil {
				checkLimits(t, w, p, c)
				w.scan()
				checkSharedState(t, w, h, p, device.TimeSliceDefault)
				mustUnprepare(t, p, c.UID)
			}
			checkClean(t, w)
			checkSharedState(t, w, h, p, device.TimeSliceDefault)
			if left := w.holders(); len(left) != 0 || len(h.of(t, gpu0).Instances) != 0 {
				t.Errorf("left after %v: %q, %s", err, left, steps.DescribeInstances(h.of(t, gpu0).State().MIG.Instances...))
			}
		}
	})
}

// checkLimits fails the test if a share that must have a memory limit has none in its claim's CDI
// spec, or if a limit is not above zero.
func checkLimits(t *testing.T, w *world, p *plugin, c *resourceapi.ResourceClaim) {
	t.Helper()
	r, _, err := p.Records.Load(c.UID)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range r.Devices {
		spec := w.specs.of(c.UID)
		if d.Fraction && !d.AdminAccess && !strings.Contains(spec, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=") {
			t.Errorf("a fraction without a limit: %s", spec)
		}
		if strings.Contains(spec, "MEM_LIMIT=0=0M") || strings.Contains(spec, "MEM_LIMIT=0=-") {
			t.Errorf("a limit of nothing, or less: %s", spec)
		}
	}
}

// FuzzStepsOnRecord expects that Unprepare and Reconcile do not panic or hang, whatever steps are
// stored in a claim's record or in the file of a setting that claims share.
func FuzzStepsOnRecord(f *testing.F) {
	for _, kind := range []string{steps.ClaimSpecKind, steps.MIGInstanceKind, steps.PassthroughKind, steps.SharedKind} {
		f.Add(kind, `{}`, "Prepared", gpu0)
	}
	f.Add(
		steps.MIGInstanceKind,
		`{"device":"gpu-0000-1b-00-0-mig-19-0","gpu":"gpu-0000-1b-00-0","card":{"pciAddress":"0000:1b:00.0","uuid":"GPU-0"},`+
			`"asked":true,"before":[{}],"instance":{"id":1}}`,
		"Preparing",
		small0,
	)
	f.Add(steps.SharedKind, `{"key":"gpu-0000-1b-00-0_time-slice","gpus":["gpu-0000-1b-00-0"],"want":{"kind":"time-slice","params":{}}}`,
		"Prepared", gpu0)
	f.Add(steps.SharedKind, `{"key":"../x_mps-daemon","gpus":[".."],"want":{"kind":"mps-daemon","params":{"id":"..","uuids":["x"]}}}`,
		"Reverting",
		share0)
	f.Add(steps.SharedKind, `{"key":"_","want":{"kind":"mig-instance","params":{"placement":{"start":4294967295,"size":4294967295}}}}`, "",
		migShare0)
	f.Add(steps.ClaimSpecKind, `{"devices":[{"name":"a/b","edits":{"deviceNodes":[null]}}],"clients":[{"daemon":"x","devices":[-1,99]}]}`,
		"Prepared", gpu0)
	f.Fuzz(func(t *testing.T, kind, params, say, name string) {
		if !json.Valid([]byte(params)) {
			return
		}
		w := newWorld(t)
		withMPS(w)
		withBus(w)
		p := w.plugin(t)
		d := checkpoint.Device{Request: "r", Pool: pool, Device: name, GPU: gpu0, GPUUUID: "GPU-0"}
		r := checkpoint.Record{
			ClaimUID: "uid-c", Namespace: "default", Name: "c", State: checkpoint.State(say), BootID: w.bootID,
			Devices: []checkpoint.Device{d}, Steps: []checkpoint.Step{{Kind: kind, Params: []byte(params)}},
		}
		if err := p.Records.Save(r); err != nil {
			return // the device is no valid file name
		}
		ctx := t.Context()
		_ = p.Reconcile(ctx)
		_, _ = p.PreparedDevices(r.ClaimUID)
		_, _ = p.AllocatedDevices()
		_, _ = p.Prepare(ctx, newClaim("c", allocated("r", gpu0)))
		_ = p.Unprepare(ctx, r.ClaimUID)
	})
}
