package prepare_test

import (
	"encoding/json"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// FuzzStepsOnRecord expects that Unprepare and Reconcile do not panic or hang, whatever steps are
// stored in a claim's record or in the file of a setting that claims share.
func FuzzStepsOnRecord(f *testing.F) {
	for _, kind := range []string{steps.ClaimSpecKind, steps.MIGInstanceKind, steps.MIGModeOffKind, steps.SharedKind} {
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
		_ = p.Recover(ctx)
		_ = p.Reconcile(ctx)
		_ = p.RepairAllSpecs(ctx)
		_, _ = p.PreparedDevices(r.ClaimUID)
		_, _ = p.SharedDevices()
		_, _ = p.Prepare(ctx, newClaim("c", allocated("r", gpu0)))
		_ = p.Unprepare(ctx, r.ClaimUID)
	})
}
