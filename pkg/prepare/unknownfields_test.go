package prepare

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestUnknownFieldsOfStepsArePreserved(t *testing.T) {
	nodes := func(paths ...string) specs.ContainerEdits {
		e := specs.ContainerEdits{}
		for _, p := range paths {
			e.DeviceNodes = append(e.DeviceNodes, &specs.DeviceNode{Path: p})
		}
		return e
	}
	hooks := func(args ...string) specs.ContainerEdits {
		e := specs.ContainerEdits{}
		for _, a := range args {
			e.Hooks = append(e.Hooks, &specs.Hook{HookName: "createContainer", Path: "/hook", Args: []string{a}})
		}
		return e
	}
	long := device.TimeSliceLong
	for name, tc := range map[string]struct {
		kind, old string
		now       Step
		want      string
	}{
		"no known change keeps every byte": {
			claimSpecKind, `{"later":1, "devices":[{"edits":{},"name":"a","later":{"b":[1]}}]}`,
			&claimSpec{Devices: []specDevice{{Name: "a"}}},
			`{"later":1, "devices":[{"edits":{},"name":"a","later":{"b":[1]}}]}`,
		},
		"in a client with a changed limit": {
			claimSpecKind, `{"devices":[],"clients":[{"daemon":"d","devices":[0],"memory":1,"later":12345678901234567890}]}`,
			&claimSpec{Devices: []specDevice{}, Clients: []mpsClient{{Daemon: "d", Devices: []int{0}, Memory: 2}}},
			`{"devices":[],"clients":[{"daemon":"d","devices":[0],"memory":2,"later":12345678901234567890}]}`,
		},
		"in a client that moved in the list": {
			claimSpecKind, `{"devices":[],"clients":[{"daemon":"d","devices":[0],"memory":1,"later":1}]}`,
			&claimSpec{Devices: []specDevice{}, Clients: []mpsClient{{Daemon: "c", Devices: []int{1}}, {Daemon: "d", Devices: []int{0}}}},
			`{"devices":[],"clients":[{"daemon":"c","devices":[1]},{"daemon":"d","devices":[0],"later":1}]}`,
		},
		"nested in edits": {
			claimSpecKind, `{"devices":[{"name":"a","edits":{"later":1,"deviceNodes":[{"path":"/dev/x","later":2},{"path":"/dev/y","later":3}]}}]}`,
			&claimSpec{Devices: []specDevice{{Name: "a", Edits: nodes("/dev/y", "/dev/z")}}},
			`{"devices":[{"name":"a","edits":{"later":1,"deviceNodes":[{"path":"/dev/y","later":3},{"path":"/dev/z"}]}}]}`,
		},
		"dropped with an ambiguous element": {
			claimSpecKind, `{"devices":[{"name":"a","edits":{"hooks":[{"hookName":"createContainer","path":"/hook","args":["1"],"later":1},` +
				`{"hookName":"createContainer","path":"/hook","args":["2"],"later":2}]}}]}`,
			&claimSpec{Devices: []specDevice{{Name: "a", Edits: hooks("2", "3")}}},
			`{"devices":[{"name":"a","edits":{"hooks":[{"hookName":"createContainer","path":"/hook","args":["2"],"later":2},` +
				`{"hookName":"createContainer","path":"/hook","args":["3"]}]}}]}`,
		},
		"in an instance and its compute instance": {
			migInstanceKind, `{"device":"d","gpu":"g","card":{"pciAddress":"p","uuid":"u","later":1},"minor":0,"profileID":1,"profile":"x",` +
				`"placement":{"start":0,"size":1},"instance":{"id":1,"profileID":1,"placement":{"start":0,"size":1,"later":2},"minor":4,` +
				`"later":3,"compute":[{"id":0,"profileID":0,"placement":{"start":0,"size":0},"name":"n","multiprocessors":0,"uuid":"MIG-1",` +
				`"minor":5,"later":4}]}}`,
			&migInstance{
				Device: "d", GPU: "g", Card: device.Card{PCIAddress: "p",
					UUID: "u"}, Minor: 9, ProfileID: 1, Profile: "x", Placement: device.Placement{Size: 1},
				Instance: &device.Instance{ID: 1, ProfileID: 1, Placement: device.Placement{Size: 1}, Minor: 6,
					Compute: []device.ComputeInstance{{Name: "n", UUID: "MIG-1", Minor: 7}}},
			},
			`{"device":"d","gpu":"g","card":{"pciAddress":"p","uuid":"u","later":1},"minor":9,"profileID":1,"profile":"x",` +
				`"placement":{"start":0,"size":1},"instance":{"id":1,"profileID":1,"placement":{"start":0,"size":1,"later":2},"minor":6,` +
				`"later":3,"compute":[{"id":0,"profileID":0,"placement":{"start":0,"size":0},"name":"n","multiprocessors":0,"uuid":"MIG-1",` +
				`"minor":7,"later":4}]}}`,
		},
		"dropped with a removed instance": {
			migInstanceKind, `{"device":"d","gpu":"g","card":{"pciAddress":"p","uuid":"u"},"minor":0,"profileID":1,"profile":"x",` +
				`"placement":{"start":0,"size":1},"later":1,"asked":true,"instance":{"id":1,"profileID":1,"placement":{"start":0,"size":1},` +
				`"minor":4,"later":3}}`,
			&migInstance{Device: "d", GPU: "g", Card: device.Card{PCIAddress: "p", UUID: "u"}, ProfileID: 1, Profile: "x",
				Placement: device.Placement{Size: 1}},
			`{"device":"d","gpu":"g","card":{"pciAddress":"p","uuid":"u"},"minor":0,"profileID":1,"profile":"x","placement":{"start":0,` +
				`"size":1},"later":1}`,
		},
		"a known empty field is not restored": {
			timeSliceKind, `{"gpu":"g","card":{"pciAddress":"","uuid":""},"found":3,"want":3,"later":1}`,
			&timeSlice{settingState: settingState[device.TimeSlice]{GPU: "g"}, Want: long},
			`{"gpu":"g","card":{"pciAddress":"","uuid":""},"want":3,"later":1}`,
		},
		"a known field in another case": {
			timeSliceKind, `{"gpu":"g","card":{"pciAddress":"","uuid":""},"Found":3,"want":3}`,
			&timeSlice{settingState: settingState[device.TimeSlice]{GPU: "g"}, Want: long},
			`{"gpu":"g","card":{"pciAddress":"","uuid":""},"want":3}`,
		},
		"a removed MPS limit is not restored": {
			mpsDaemonKind, `{"id":"d","devices":["a"],"perDevice":{"0":1,"1":2},"later":1}`,
			&mpsDaemon{ID: "d", Devices: []string{"a"}, PerDevice: map[string]uint64{"0": 3}},
			`{"id":"d","devices":["a"],"perDevice":{"0":3},"later":1}`,
		},
		"in the wanted shared step": {
			sharedKind, `{"key":"k","gpus":["g"],"want":{"kind":"time-slice","params":{"want":3,"later":[{"a":1}]},"later":2},"later":3}`,
			&sharedStep{Key: "k", GPUs: []string{"g", "h"}, Want: decodeWanted(t,
				`{"kind":"time-slice","params":{"want":3,"later":[{"a":1}]},"later":2}`)},
			`{"key":"k","gpus":["g","h"],"want":{"kind":"time-slice","params":{"want":3,"later":[{"a":1}]},"later":2},"later":3}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := encodeStepOver(checkpoint.Step{Kind: tc.kind, Params: []byte(tc.old)}, tc.now)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(name, "to the byte") && string(got.Params) != tc.want {
				t.Errorf("%s", got.Params)
			}
			if diff := cmp.Diff(decodeExact(t, tc.want), decodeExact(t, string(got.Params))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestUnknownFieldsSurviveReorderedSteps(t *testing.T) {
	before := []checkpoint.Step{
		{Kind: claimSpecKind, Params: []byte(`{"devices":null,"later":1}`)},
		{Kind: sharedKind, Params: []byte(`{"key":"a","gpus":null,"want":{"kind":"","params":null},"later":2}`)},
		{Kind: sharedKind, Params: []byte(`{"key":"b","gpus":null,"want":{"kind":"","params":null},"later":3}`)},
	}
	got, err := encodeSteps([]Step{&sharedStep{Key: "a"}, &sharedStep{Key: "b"}, &claimSpec{}}, before)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{`"later":2`, `"later":3`, `"later":1`} {
		if !strings.Contains(string(got[i].Params), want) {
			t.Errorf("%s has not %s", got[i].Params, want)
		}
	}
}

func decodeWanted(t *testing.T, raw string) (s checkpoint.Step) {
	t.Helper()
	if err := json.Unmarshal([]byte(raw), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

func decodeExact(t *testing.T, raw string) (v any) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(raw))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// After a rollback an earlier version serves the node. If it changes no field that it knows, it
// must not rewrite the claims' records and the files of shared settings.
func TestRecordWithOnlyUnknownFieldsIsNotRewritten(t *testing.T) {
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "first leaves") && !strings.HasSuffix(s.name, "last leaves") {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			w, _, _, _ := interruptedScene(t, s)
			before := map[string][]byte{}
			for _, sub := range []string{"claims", "holders"} {
				for _, name := range w.disk.Names(filepath.Join(state, sub)) {
					file := filepath.Join(state, sub, name)
					raw, err := w.disk.ReadFile(file)
					if err != nil {
						t.Fatal(err)
					}
					before[file] = addUnknownFields(t, raw)
					w.disk.Put(file, before[file])
				}
			}
			p := w.plugin(t)
			for _, do := range []func() error{
				func() error { return p.Recover(t.Context()) },
				func() error { return p.Reconcile(t.Context()) },
				func() error { return p.RepairAllSpecs(t.Context()) },
			} {
				if err := do(); err != nil {
					t.Fatal(err)
				}
			}
			for _, c := range s.claims {
				mustPrepare(t, p, c)
			}
			for file, want := range before {
				if got, err := w.disk.ReadFile(file); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s was written: %v\n%s\n%s", file, err, want, got)
				}
			}
		})
	}
}

// Every element of a list in a step must have an identifying field. Otherwise the first change to
// the list loses the elements' unknown fields. If you add a list, either give its elements one of
// the fields in identities, or raise readableFrom of package checkpoint with their first new field.
func TestListElementsOfStepsHaveIdentities(t *testing.T) {
	lists := 0
	var walk func(path string, in reflect.Type)
	walk = func(path string, in reflect.Type) {
		switch in.Kind() {
		case reflect.Pointer, reflect.Map:
			walk(path, in.Elem())
		case reflect.Slice:
			if element := in.Elem(); element.Kind() == reflect.Pointer || element.Kind() == reflect.Struct {
				lists++
				empty, err := json.Marshal(reflect.New(dereference(element)).Interface())
				if err != nil {
					t.Fatal(err)
				}
				if !slices.ContainsFunc(identities, func(name string) bool { return hasField(decodeExact(t, string(empty)).(map[string]any), name) }) {
					t.Errorf("%s: nothing tells its elements apart: %s", path, empty)
				}
			}
			walk(path+"[]", in.Elem())
		case reflect.Struct:
			for _, field := range reflect.VisibleFields(in) {
				if tag, _, _ := strings.Cut(field.Tag.Get("json"), ","); tag != "" {
					walk(path+"."+tag, field.Type)
				}
			}
		}
	}
	for kind, step := range stepKinds {
		walk(kind, reflect.TypeOf(step()))
	}
	for kind, step := range sharableKinds {
		walk(kind, reflect.TypeOf(step()))
	}
	if lists < 5 {
		t.Errorf("only %d lists were found", lists)
	}
}

func dereference(t reflect.Type) reflect.Type {
	if t.Kind() == reflect.Pointer {
		return t.Elem()
	}
	return t
}
