// The records say which claims share something, and the holder file how to undo it. So claims can
// end with unreadable records and after an upgrade.

package prepare_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

// AllocatedDevices must report all devices of which claims have shares, even if records are
// unreadable, because the driver publishes the further shares of a device according to this result.
func TestSharedDevicesSurviveUnreadableRecords(t *testing.T) {
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "joined") {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			w := newWorld(t)
			withMPS(w)
			p := w.plugin(t)
			want := map[string]bool{}
			known := func(when string) {
				t.Helper()
				if got, err := p.AllocatedDevices(); err != nil || !maps.Equal(got.Shared, want) {
					t.Errorf("%s: held are %v (%v), want %v", when, got, err, want)
				}
			}
			known("before")
			for _, c := range s.claims {
				mustPrepare(t, p, c)
				for _, r := range c.Status.Allocation.Devices.Results {
					if name, ok := device.ParseName(r.Device); ok && name.Share {
						_, want[r.Device] = r.ConsumedCapacity[device.CapacityMemory]
					}
				}
				w.scan()
				known("while held")
			}
			for _, c := range s.claims {
				w.disk.Put(recordFile(t, w, string(c.UID)), []byte("{"))
				known("with unreadable records")
			}
			for _, c := range s.claims {
				mustUnprepare(t, p, c.UID)
			}
			clear(want)
			known("afterwards")
		})
	}
}

// Claims that share a GPU setting, daemon or partition must be able to leave it in any order, even
// if some or all of their records are unreadable.
func TestClaimsLeaveSharedStateWithUnreadableRecords(t *testing.T) {
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "joined") && !strings.HasSuffix(s.name, "first") {
			continue
		}
		for _, spoilt := range [][]int{{0}, {len(s.claims) - 1}, {0, len(s.claims) - 1}} {
			for _, backwards := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %v, backwards %v", s.name, spoilt, backwards), func(t *testing.T) {
					w := newWorld(t)
					h := withMPS(w)
					h.of(t, gpu0).TimeSlice = device.TimeSliceMedium
					for _, c := range s.claims {
						mustPrepare(t, w.plugin(t), c)
						w.scan()
					}
					for _, i := range spoilt {
						w.disk.Put(recordFile(t, w, string(s.claims[i].UID)), []byte("{"))
					}
					p := w.plugin(t)
					reconcileUnreadable(t, p)
					for i := range s.claims {
						c := s.claims[i]
						if backwards {
							c = s.claims[len(s.claims)-1-i]
						}
						mustUnprepare(t, p, c.UID)
					}
					checkSharedState(t, w, h, p, device.TimeSliceMedium)
					checkClean(t, w)
					if left := w.holders(); len(left) != 0 {
						t.Errorf("holders left: %q", left)
					}
					// Instances that were created for one claim alone stay, because without the claim's record
					// nothing proves that this driver created them.
					if s.claims[0] != parted && len(h.of(t, gpu0).Instances) != 0 {
						t.Errorf("left: %s", steps.DescribeInstances(h.of(t, gpu0).State().MIG.Instances...))
					}
				})
			}
		}
	}
}

func TestHolderFileWithWrongStepKindIsAnError(t *testing.T) {
	w := newWorld(t)
	withMPS(w)
	p := w.plugin(t)
	other, err := steps.NewShared(gpu0, []string{gpu0}, steps.NewExclusiveMode(gpu0, device.Card{}))
	if err != nil {
		t.Fatal(err)
	}
	name, _ := device.ParseName(migShare0)
	if err := p.Records.SaveHolder(checkpoint.Holder{Key: steps.PartitionKey(name), GPUs: []string{gpu0}, State: checkpoint.Applied,
		BootID: w.bootID, Step: other.Want}); err != nil {
		t.Fatal(err)
	}
	_, err = p.Prepare(t.Context(), migPart1)
	if cause.Of(err) != cause.Record || !strings.Contains(err.Error(), steps.PartitionKey(name)) ||
		!strings.Contains(err.Error(), steps.ComputeModeKind) ||
		strings.Contains(err.Error(), "%!") {
		t.Errorf("cause %s: %v", cause.Of(err), err)
	}
}

// A damaged or foreign file of a shared partition must not crash the plugin. The claims that share
// the partition get an error that names the file.
func TestHolderFileWithWrongStepOfPreparedClaimIsAnError(t *testing.T) {
	other, err := steps.NewShared(gpu0, []string{gpu0}, steps.NewExclusiveMode(gpu0, device.Card{}))
	if err != nil {
		t.Fatal(err)
	}
	for what, step := range map[string]checkpoint.Step{"another kind": other.Want, "no step": {}} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t)
			withMPS(w)
			p := w.plugin(t)
			mustPrepare(t, p, migPart1)
			name, _ := device.ParseName(migShare0)
			h, _, err := p.Records.Holder(steps.PartitionKey(name))
			if err != nil {
				t.Fatal(err)
			}
			h.Step = step
			if err := p.Records.SaveHolder(h); err != nil {
				t.Fatal(err)
			}
			_, again := p.Prepare(t.Context(), migPart1)
			_, join := p.Prepare(t.Context(), migPart2)
			for what, err := range map[string]error{
				"prepare again": again, "join": join, "reconcile": p.Reconcile(t.Context()),
			} {
				if err == nil || !strings.Contains(err.Error(), h.Key) || !strings.Contains(err.Error(), cmp.Or(step.Kind, `""`)) {
					t.Errorf("%s: %v", what, err)
				}
			}
			if cause.Of(again) != cause.Record || cause.Of(join) != cause.Record {
				t.Errorf("causes %s and %s", cause.Of(again), cause.Of(join))
			}
			if devices, err := p.PreparedDevices(migPart1.UID); err != nil || len(devices) == 0 {
				t.Errorf("%v, %v", devices, err)
			}
			if step.Kind != "" {
				mustUnprepare(t, p, migPart1.UID)
			}
		})
	}
}

// If the file of a shared setting is unreadable, no further claim can share the setting. Claims
// that already share it must keep working, and the last one to leave must reset it to the default.
func TestUnreadableHolderRefusesJoinsAndEndsInDefault(t *testing.T) {
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "joined") {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			w := newWorld(t)
			h := withMPS(w)
			h.of(t, gpu0).TimeSlice = device.TimeSliceMedium
			p := w.plugin(t)
			for _, c := range s.claims {
				mustPrepare(t, p, c)
			}
			w.scan()
			for _, file := range w.holders() {
				w.disk.Put(filepath.Join(state, "holders", file), []byte("{}"))
			}
			third := s.claims[0].DeepCopy()
			third.Name, third.UID = "third", "uid-third"
			if _, err := p.Prepare(t.Context(), third); cause.Of(err) != cause.Held ||
				!strings.Contains(err.Error(), "it is unknown how ") {
				t.Errorf("cause %s: %v", cause.Of(err), err)
			}
			if s.claims[0] != migPart1 { // only the lost file proved that the driver created the MIG instance
				h.of(t, gpu0).ForgetSettings()
				clear(w.daemons.running)
				if err := p.Reconcile(t.Context()); err != nil {
					t.Fatal(err)
				}
				if w.daemons.running[share0].ID == "" && h.of(t, gpu0).TimeSlice != device.TimeSliceLong {
					t.Errorf("not maintained: %v, %d", w.daemons.running, h.of(t, gpu0).TimeSlice)
				}
			}
			mustUnprepare(t, p, s.claims[0].UID)
			if len(w.holders()) == 0 {
				t.Error("the first claim to leave removed the shared state")
			}
			mustUnprepare(t, p, s.claims[1].UID)
			s := h.of(t, gpu0)
			if s.TimeSlice != device.TimeSliceDefault && s.TimeSlice != device.TimeSliceMedium || s.ComputeMode != device.ComputeDefault ||
				len(w.daemons.running) != 0 || len(w.holders()) != 0 {
				t.Errorf("left: time slice %d, compute mode %s, %v, %q", s.TimeSlice, s.ComputeMode, w.daemons.running, w.holders())
			}
			checkClean(t, w)
		})
	}
}

// Two plugin instances may both find the same unreadable file of a shared setting. So Reconcile
// must quarantine it only under the lock of the GPU or claim.
func TestUnreadableHolderIsQuarantinedUnderItsLock(t *testing.T) {
	for _, c := range []struct {
		claim *resourceapi.ResourceClaim
		lock  string
	}{{part1, gpu0}, {grouped, string(grouped.UID)}} {
		w := newWorld(t)
		withMPS(w)
		mustPrepare(t, w.plugin(t), c.claim)
		key := ""
		for _, file := range w.holders() {
			if strings.HasSuffix(file, "_"+steps.MPSDaemonKind+".json") {
				key = strings.TrimSuffix(file, ".json")
				w.disk.Put(filepath.Join(state, "holders", file), nil)
			}
		}
		synctest.Test(t, func(t *testing.T) {
			p := w.plugin(t)
			if err := p.Records.Remove(c.claim.UID); err != nil {
				t.Fatal(err)
			}
			held, err := p.Locks.Acquire(t.Context(), c.lock)
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Reconcile(t.Context()); cause.Of(err) != cause.Canceled || len(w.daemons.running) != 1 {
				t.Errorf("%s: while another call works on it: %v, %v", key, err, w.daemons.running)
			}
			held.Release()
			if err := p.Reconcile(t.Context()); err != nil || len(w.daemons.running) != 0 {
				t.Errorf("%s: %v, %v", key, err, w.daemons.running)
			}
		})
	}
}

var update = flag.Bool("update", false, "write the files of testdata anew: those of a version that was released are never changed")

// golden is a directory with files that earlier versions wrote for claims that share devices: the
// claims' records, and the files of what they share.
const golden = "testdata/sharing"

// This version must be able to prepare and unprepare claims with the files of shared settings that
// earlier versions wrote.
func TestSharedStateOfEarlierVersionsIsUsable(t *testing.T) {
	versions, err := os.ReadDir(golden)
	if err != nil || len(versions) == 0 {
		t.Fatal("no files to be read: ", err)
	}
	for _, version := range versions {
		for _, s := range sharingScenes() {
			if !strings.HasSuffix(s.name, "last leaves") && !strings.HasSuffix(s.name, "first leaves") {
				continue
			}
			for _, later := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, of a later version %v", version.Name(), s.name, later), func(t *testing.T) {
					w, h, _, found := interruptedScene(t, s)
					putGolden(t, w, filepath.Join(golden, version.Name(), sceneDir(s)), later)
					p := w.plugin(t)
					if err := p.Reconcile(t.Context()); err != nil {
						t.Fatal(err)
					}
					checkSharedState(t, w, h, p, found)
					if len(s.claims) > 1 {
						third := s.claims[0].DeepCopy()
						third.Name, third.UID = "third", "uid-third"
						mustPrepare(t, p, third)
						checkSharedState(t, w, h, p, found)
						mustUnprepare(t, p, third.UID)
					}
					for _, c := range s.claims {
						mustPrepare(t, p, c)
					}
					mustLeave(t, w, h, p, found, s.claims...)
				})
			}
		}
	}
}

// Version 0.1 wrote these files. This version must write the same bytes for the same claims, until
// it has a format of its own.
func TestSharedStateIsWrittenAsInVersion01(t *testing.T) {
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "last leaves") && !strings.HasSuffix(s.name, "first leaves") {
			continue
		}
		w, _, _, _ := interruptedScene(t, s)
		for _, sub := range []string{"claims", "holders"} {
			dir := filepath.Join(golden, presentForm, sceneDir(s), sub)
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
			if err := p.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
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

func sceneDir(s sharingScene) string {
	return strings.NewReplacer(" ", "-", ":", "").Replace(s.name)
}

// putGolden copies the files in dir to the fake disk. If later is true, it adds unknown fields, as
// a later version would.
func putGolden(t *testing.T, w *world, dir string, later bool) {
	t.Helper()
	for _, sub := range []string{"claims", "holders"} {
		entries, err := os.ReadDir(filepath.Join(dir, sub))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			raw, err := os.ReadFile(filepath.Join(dir, sub, e.Name()))
			if err != nil {
				t.Fatal(err)
			}
			if later {
				raw = addUnknownFields(t, raw)
			}
			names = append(names, e.Name())
			w.disk.Put(filepath.Join(state, sub, e.Name()), raw)
		}
		own := w.disk.Names(filepath.Join(state, sub))
		slices.Sort(own)
		if !slices.Equal(own, names) {
			t.Fatalf("the node has %q, but the files are %q", own, names)
		}
	}
}

// addUnknownFields adds a field of a later version to every object in the JSON of a file.
func addUnknownFields(t *testing.T, raw []byte) []byte {
	t.Helper()
	var e struct {
		Kind    string
		Payload any
	}
	if err := json.Unmarshal(raw, &e); err != nil {
		t.Fatal(err)
	}
	var add func(v any)
	add = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for name, inner := range v {
				// The names in these two objects are not field names but devices or capacities.
				if name != "perDevice" && name != "consumedCapacity" {
					add(inner)
				}
			}
			v["ofALaterVersion"] = "x"
		case []any:
			for _, inner := range v {
				add(inner)
			}
		}
	}
	add(e.Payload)
	disk := durabletest.New()
	if err := (statefile.Format{Kind: e.Kind, Version: 1, MinReader: 1}).Write(disk, "/file", e.Payload); err != nil {
		t.Fatal(err)
	}
	changed, err := disk.ReadFile("/file")
	if err != nil {
		t.Fatal(err)
	}
	return changed
}
