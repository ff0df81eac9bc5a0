package prepare

import (
	"encoding/json"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// FuzzStepsOnRecord expects that Unprepare and Reconcile do not panic or hang, whatever steps are
// stored in a claim's record or in the file of a setting that claims share.
func FuzzStepsOnRecord(f *testing.F) {
	for kind := range stepKinds {
		f.Add(kind, `{}`, "Prepared", gpu0)
	}
	f.Add(
		migInstanceKind,
		`{"device":"gpu-0000-1b-00-0-mig-19-0","gpu":"gpu-0000-1b-00-0","card":{"pciAddress":"0000:1b:00.0","uuid":"GPU-0"},`+
			`"asked":true,"before":[{}],"instance":{"id":1}}`,
		"Preparing",
		small0,
	)
	f.Add(sharedKind, `{"key":"gpu-0000-1b-00-0_time-slice","gpus":["gpu-0000-1b-00-0"],"want":{"kind":"time-slice","params":{}}}`,
		"Prepared", gpu0)
	f.Add(sharedKind, `{"key":"../x_mps-daemon","gpus":[".."],"want":{"kind":"mps-daemon","params":{"id":"..","uuids":["x"]}}}`, "Reverting",
		share0)
	f.Add(sharedKind, `{"key":"_","want":{"kind":"mig-instance","params":{"placement":{"start":4294967295,"size":4294967295}}}}`, "",
		migShare0)
	f.Add(claimSpecKind, `{"devices":[{"name":"a/b","edits":{"deviceNodes":[null]}}],"clients":[{"daemon":"x","devices":[-1,99]}]}`,
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

// FuzzUnknownFieldsDoNotChangeKnownFields encodes a step over an older encoding that has unknown
// fields. It expects that the result keeps these and has the new values of the known fields.
func FuzzUnknownFieldsDoNotChangeKnownFields(f *testing.F) {
	f.Add(
		migInstanceKind,
		`{"device":"d","Asked":true,"before":[{"id":1,"x":1},{"id":1}],"instance":{"id":1,"compute":[{"id":0,"x":2}]},"x":null}`,
		`{"device":"d","before":[{"id":1}],"instance":{"id":1,"compute":[{"id":0,"minor":3}]}}`,
	)
	f.Add(mpsDaemonKind, `{"id":"d","perDevice":{"0":1,"a":2},"UUIDS":["x"],"memory":0}`, `{"id":"d","perDevice":{"A":1}}`)
	f.Add(sharedKind, `{"key":"k","want":{"kind":"x","params":{"a":1},"b":2}}`, `{"key":"k","want":{"kind":"x","params":{"a":2}}}`)
	f.Add(claimSpecKind, `{"devices":[{"name":"a","edits":{"hooks":[null,{"path":"p"},{"path":"p","x":[]}]}}],"clients":[]}`,
		`{"devices":[{"name":"a","edits":{"hooks":[{"path":"p"},null]}}]}`)
	f.Fuzz(func(t *testing.T, kind, before, after string) {
		empty, known := stepKinds[kind]
		if !known {
			shared, known := sharableKinds[kind]
			if !known {
				return
			}
			empty = func() Step { return shared() }
		}
		now := empty()
		if json.Unmarshal([]byte(before), empty()) != nil || json.Unmarshal([]byte(after), now) != nil {
			return
		}
		got, err := encodeStepOver(checkpoint.Step{Kind: kind, Params: []byte(before)}, now)
		if err != nil {
			t.Fatal(err)
		}
		want, err := encodeStep(now)
		if err != nil {
			t.Fatal(err)
		}
		if read, err := knownPart(got, now); err != nil || string(read) != string(want.Params) {
			t.Errorf("%s is read of %s, and %s was written over %s: %v", read, got.Params, want.Params, before, err)
		}
	})
}
