// Files in the state directory outlive an upgrade. This version must serve the claims of each form
// that they had.

package prepare_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// recordForms has a directory for each form of the state files, with the files of each recordScene.
// testdata/README.md says how they were made.
const recordForms = "testdata/records"

// presentForm is the form that this version writes, as in package steps.
const presentForm = "v0.1"

// prepareScene returns a fake node on which this version has prepared the scene's claim, and what
// Prepare returned.
func prepareScene(t *testing.T, s recordScene) (*world, []kubeletplugin.Device) {
	t.Helper()
	w := newWorld(t)
	w.bindings = map[device.PCIAddress]string{}
	for i := range w.snapshot.Node.GPUs {
		g := &w.snapshot.Node.GPUs[i]
		g.ProductName, g.MemoryBytes, g.Binding = "NVIDIA H100 80GB HBM3", 80*gib, "1"
		w.bindings[g.PCIAddress] = g.Binding
	}
	s.on(t, w)
	devices := mustPrepare(t, w.plugin(t), s.claim)
	if w.hardware != nil {
		w.scan()
		w.hardware.takeCalls()
	}
	return w, devices
}

// useForm replaces the node's state files by those that the scene has in an earlier form.
func useForm(t *testing.T, w *world, dir string) {
	t.Helper()
	for _, sub := range []string{"claims", "holders", "mig"} {
		names := w.disk.Names(filepath.Join(state, sub))
		for _, name := range names {
			raw, err := os.ReadFile(filepath.Join(dir, sub, name))
			if err != nil {
				t.Fatal(err)
			}
			w.disk.Put(filepath.Join(state, sub, name), raw)
		}
		if files, err := os.ReadDir(filepath.Join(dir, sub)); len(files) != len(names) {
			t.Fatalf("the node has %q, but the files are %v: %v", names, files, err)
		}
	}
}

func TestClaimsOfEveryRecordFormAreServed(t *testing.T) {
	forms, err := filepath.Glob(filepath.Join(recordForms, "*", ""))
	if err != nil || len(forms) < 2 {
		t.Fatal("no forms: ", err)
	}
	ways := map[string]func(t *testing.T, s recordScene, w *world, p *plugin, before []kubeletplugin.Device){
		"it goes on":               goesOn,
		"the kubelet asks again":   kept,
		"its spec was lost":        specIsWritten,
		"the node boots":           bootsAndGoesOn,
		"the claim ends at once":   func(*testing.T, recordScene, *world, *plugin, []kubeletplugin.Device) {},
		"a later version wrote it": goesOnWithLaterFields,
	}
	for _, form := range forms {
		if info, err := os.Stat(form); err != nil || !info.IsDir() {
			continue
		}
		for _, s := range recordScenes() {
			for way, serve := range ways {
				t.Run(strings.Join([]string{filepath.Base(form), s.name, way}, ", "), func(t *testing.T) {
					w, before := prepareScene(t, s)
					useForm(t, w, filepath.Join(form, s.name))
					p := w.plugin(t)
					serve(t, s, w, p, before)
					mustUnprepare(t, p, s.claim.UID)
					checkClean(t, w)
					checkNothingIsLeft(t, s, w)
				})
			}
		}
	}
}

// kept fails the test unless Prepare keeps the record, the hardware and its answer.
func kept(t *testing.T, s recordScene, w *world, p *plugin, before []kubeletplugin.Device) {
	t.Helper()
	spec := w.specs.of(s.claim.UID)
	again := mustPrepare(t, p, s.claim)
	if !slices.EqualFunc(again, before, func(a, b kubeletplugin.Device) bool { return slices.Equal(a.CDIDeviceIDs, b.CDIDeviceIDs) }) {
		t.Errorf("Prepare returned %v, and before %v", again, before)
	}
	if now := w.specs.of(s.claim.UID); now == "" || now != spec {
		t.Errorf("the spec was %s and is %s", spec, now)
	}
	r, found, err := p.Records.Load(s.claim.UID)
	if err != nil || !found || r.State != checkpoint.Prepared || r.BootID != w.bootID {
		t.Errorf("%+v, %v, %v", r, found, err)
	}
	for _, d := range r.Devices {
		if name, _ := device.ParseName(d.Device); d.Binding != w.bindings[name.PCIAddress()] && !name.Passthrough {
			t.Errorf("the record of %s has binding %q", d.Device, d.Binding)
		}
	}
	checkNoChange(t, w)
}

// goesOn fails the test unless reconciliation leaves the claim as it is, and Prepare keeps it.
func goesOn(t *testing.T, s recordScene, w *world, p *plugin, before []kubeletplugin.Device) {
	t.Helper()
	spec := w.specs.of(s.claim.UID)
	passes(t, p)
	if now := w.specs.of(s.claim.UID); now != spec {
		t.Errorf("the spec was %s and is %s", spec, now)
	}
	checkNoChange(t, w)
	kept(t, s, w, p, before)
}

func specIsWritten(t *testing.T, s recordScene, w *world, p *plugin, before []kubeletplugin.Device) {
	t.Helper()
	spec := w.specs.of(s.claim.UID)
	w.specs.clear()
	if err := p.Reconcile(t.Context()); err != nil || w.specs.of(s.claim.UID) != spec {
		t.Errorf("%v, the spec was %s and is %s", err, spec, w.specs.of(s.claim.UID))
	}
	kept(t, s, w, p, before)
}

// bootsAndGoesOn boots the node. As before the boot, the admin makes their partitions.
func bootsAndGoesOn(t *testing.T, s recordScene, w *world, p *plugin, _ []kubeletplugin.Device) {
	t.Helper()
	w.reboot()
	if w.bus != nil {
		for _, f := range w.bus.Functions {
			f.Driver, f.Override = f.Native, ""
		}
	}
	if w.hardware != nil {
		s.on(t, w)
		w.scan()
	}
	q := w.plugin(t)
	passes(t, q)
	mustPrepare(t, q, s.claim)
	if r, _, err := q.Records.Load(s.claim.UID); err != nil || r.State != checkpoint.Prepared || r.BootID != w.bootID ||
		w.specs.of(s.claim.UID) == "" {
		t.Errorf("%+v, %v, spec %s", r, err, w.specs.of(s.claim.UID))
	}
	*p = *q
}

// goesOnWithLaterFields adds unknown fields to all files, as a later version would.
func goesOnWithLaterFields(t *testing.T, s recordScene, w *world, p *plugin, before []kubeletplugin.Device) {
	t.Helper()
	for _, sub := range []string{"claims", "holders", "mig"} {
		for _, name := range w.disk.Names(filepath.Join(state, sub)) {
			file := filepath.Join(state, sub, name)
			raw, err := w.disk.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			w.disk.Put(file, addUnknownFields(t, raw))
		}
	}
	goesOn(t, s, w, p, before)
}

// checkNoChange fails the test if the plugin has changed the hardware since prepareScene.
func checkNoChange(t *testing.T, w *world) {
	t.Helper()
	if w.hardware == nil {
		return
	}
	reads := []string{"query", "read", "start"} // to start a daemon that runs changes nothing
	for _, call := range w.hardware.takeCalls() {
		if op, _, _ := strings.Cut(call, " "); !slices.Contains(reads, op) {
			t.Errorf("hardware call %q", call)
		}
	}
}

// checkNothingIsLeft fails the test unless the hardware is as it was before the claim.
func checkNothingIsLeft(t *testing.T, s recordScene, w *world) {
	t.Helper()
	if left := w.holders(); len(left) > 0 || len(w.daemons.running) > 0 {
		t.Errorf("left: %q, %v", left, w.daemons.running)
	}
	if w.bus != nil && !slices.Equal(drivers(w.bus), atHome) {
		t.Errorf("bound to %q", drivers(w.bus))
	}
	if w.hardware == nil {
		return
	}
	theirs := 0
	if len(s.claim.Status.Allocation.Devices.Results) == 1 && strings.HasPrefix(s.claim.Status.Allocation.Devices.Results[0].Device, large4) {
		theirs = 1
	}
	for _, gpu := range []string{gpu0, gpu1} {
		g := w.hardware.of(t, gpu)
		if len(g.Instances) != theirs || g.ComputeMode != device.ComputeDefault || g.TimeSlice != device.TimeSliceDefault {
			t.Errorf("%s: left: %s, %s, %d", gpu, steps.DescribeInstances(g.State().MIG.Instances...), g.ComputeMode, g.TimeSlice)
		}
		theirs = 0
	}
}

// A change of these files is a change of the form: see "field of a state file" in
// docs/contributing.md.
func TestRecordsAreWrittenInThePresentForm(t *testing.T) {
	for _, s := range recordScenes() {
		w, _ := prepareScene(t, s)
		for _, sub := range []string{"claims", "holders", "mig"} {
			dir := filepath.Join(recordForms, presentForm, s.name, sub)
			for _, name := range w.disk.Names(filepath.Join(state, sub)) {
				raw, err := w.disk.ReadFile(filepath.Join(state, sub, name))
				if err == nil && *update {
					err = errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, name), raw, 0o644))
				}
				if err != nil {
					t.Fatal(err)
				}
				if want, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(raw, want) {
					t.Errorf("%s: %v\n%s\n%s", name, err, raw, want)
				}
			}
		}
	}
}
