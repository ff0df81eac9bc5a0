package predecessor

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

const (
	driver = "gpu.nvidia.com"
	boot   = "boot-1"
	gpu1   = "GPU-11111111-2222-3333-4444-555555555555"
	gpu2   = "GPU-22222222-2222-3333-4444-555555555555"
	first  = "bbbbbbbb-1111-4222-8333-444444444444"
	second = "cccccccc-1111-4222-8333-444444444444"
)

func read(t *testing.T, name string) []byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestParseReadsReferenceDriverCheckpoints(t *testing.T) {
	for name, want := range map[string][]Claim{
		"v1.json": {{
			UID: "aaaaaaaa-1111-4222-8333-444444444444", Pods: []string{"trainer"}, Preparation: "aaaaaaaa-0000-4000-8000-000000000001",
			TimeSlices: true,
			Devices:    []Device{{Name: "gpu-0", GPUUUID: gpu1}},
		}},
		"v2.json": {{
			UID: first, Pods: []string{"server"}, Preparation: "bbbbbbbb-0000-4000-8000-000000000001",
			MPS: true, Daemons: []string{first + "-a1b2c"},
			Devices: []Device{
				{Name: "gpu-0", GPUUUID: gpu1},
				{Name: "gpu-1-mig-1g10gb-19-0", GPUUUID: gpu2, PCIBusID: "0000:43:00.0", MIG: &MIG{
					UUID: "MIG-77777777-2222-3333-4444-555555555555", GPUInstanceID: ptr.To[uint32](7), ComputeInstanceID: ptr.To[uint32](0),
				}},
				{Name: "gpu-vfio-2", GPUUUID: "GPU-33333333-2222-3333-4444-555555555555", PCIBusID: "0000:8B:00.0"},
			},
		}, {
			UID: second, Namespace: "team", Name: "begun", Pods: []string{"starting"}, Preparation: "cccccccc-0000-4000-8000-000000000001",
			Devices: []Device{{Name: "gpu-3"}},
		}},
	} {
		got, outdated, err := Parse(read(t, name), driver, boot)
		if err != nil || outdated {
			t.Fatalf("%s: outdated %v, %v", name, outdated, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestCheckpointFromEarlierBootListsNoClaims(t *testing.T) {
	if claims, outdated, err := Parse(read(t, "v2.json"), driver, "boot-2"); len(claims) != 0 || !outdated || err != nil {
		t.Errorf("%v, %v, %v", claims, outdated, err)
	}
	if claims, outdated, err := Parse(read(t, "v1.json"), driver, "boot-2"); len(claims) != 1 || outdated || err != nil {
		t.Errorf("V1 has no boot ID: %v, %v, %v", claims, outdated, err)
	}
}

func TestUnknownDeviceKindNamesNoGPU(t *testing.T) {
	claims, _, err := Parse([]byte(`{"v2":{"preparedClaims":{"u":{"preparedDevices":[{"devices":[{"later":{}}]}]}}}}`), driver, boot)
	if err != nil || len(claims) != 1 || len(claims[0].Devices) != 1 || claims[0].Devices[0] != (Device{}) {
		t.Errorf("%+v, %v", claims, err)
	}
}

// badCheckpoints are contents of a checkpoint that the package must reject.
var badCheckpoints = map[string]string{
	"empty":                "",
	"torn":                 `{"v2":{"preparedClaims":{"u":{`,
	"no version":           `{"checksum":1}`,
	"null":                 `{"v1":null,"v2":null}`,
	"a later version":      `{"v1":{},"v2":{},"v3":{"preparedClaims":{}}}`,
	"of another form":      `{"v2":{"preparedClaims":[]}}`,
	"not an object":        `[]`,
	"a UID that is a path": `{"v2":{"preparedClaims":{"../../etc":{}}}}`,
	"a daemon's ID that is a command": `{"v2":{"preparedClaims":{"u":{"preparedDevices":[
		{"configState":{"mpsControlDaemonID":"a; rm -r b"}}]}}}}`,
}

func TestUnreadableCheckpointErrorNamesTheWayOut(t *testing.T) {
	for name, content := range badCheckpoints {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, File), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		s := NewStore(dir, filepath.Join(dir, "state"), driver, boot, durable.OS{})
		_, err := s.Claims()
		unreadable := new(UnreadableError)
		if !errors.As(err, &unreadable) ||
			!strings.Contains(err.Error(), s.Path()) || !strings.Contains(err.Error(), "move the file away") {
			t.Errorf("%s: %v", name, err)
		}
		if err := os.Remove(s.Path()); err != nil {
			t.Fatal(err)
		}
		if claims, err := s.Claims(); claims != nil || err != nil {
			t.Errorf("%s, moved away: %v, %v", name, claims, err)
		}
	}
}

func TestEndedClaimsAreRememberedUntilAllEnd(t *testing.T) {
	dir := t.TempDir()
	state := filepath.Join(dir, "state")
	if err := errors.Join(os.Mkdir(state, 0o700), os.WriteFile(filepath.Join(dir, File), read(t, "v2.json"), 0o600)); err != nil {
		t.Fatal(err)
	}
	store := func() *Store { return NewStore(dir, state, driver, boot, durable.OS{}) }
	s := store()
	listed, err := s.Claims()
	if err != nil || len(listed) != 2 {
		t.Fatal(listed, err)
	}
	for range 2 { // the kubelet may ask twice
		if renamedTo, err := s.MarkEnded(listed[0]); renamedTo != "" || err != nil {
			t.Fatal(renamedTo, err)
		}
	}
	// A later version must understand the note, so its form never changes.
	note, err := os.ReadFile(filepath.Join(state, Notes, first))
	if err != nil || string(note) != "bbbbbbbb-0000-4000-8000-000000000001" {
		t.Errorf("the note says %q: %v", note, err)
	}
	for _, s := range []*Store{s, store()} {
		if claims, err := s.Claims(); err != nil || len(claims) != 1 || claims[0].UID != second {
			t.Fatal(claims, err)
		}
	}
	renamedTo, err := s.MarkEnded(listed[1])
	if err != nil || renamedTo == "" {
		t.Fatal(renamedTo, err)
	}
	if notes, err := os.ReadDir(filepath.Join(state, "predecessor")); err != nil || len(notes) != 0 {
		t.Errorf("notes are left: %v, %v", notes, err)
	}
	if content, err := os.ReadFile(renamedTo); err != nil || string(content) != string(read(t, "v2.json")) {
		t.Errorf("the renamed checkpoint changed: %v", err)
	}
	for _, s := range []*Store{s, store()} {
		if claims, err := s.Claims(); len(claims) != 0 || err != nil {
			t.Error(claims, err)
		}
	}
}

// checkpointWith returns a checkpoint of NVIDIA's DRA driver. reservedFor has what each claim is
// reserved for, by the claim's UID.
func checkpointWith(reservedFor map[types.UID]string) string {
	var entries []string
	for uid, reserved := range reservedFor {
		entries = append(entries, fmt.Sprintf(`%q: {"checkpointState": "PrepareCompleted", "status": {"reservedFor": [%s]}, "preparedDevices": [
			{"devices": [{"gpu": {"info": {"uuid": %q}, "device": {"DeviceName": "gpu-0"}}}], "configState": {}}]}`, uid, reserved, gpu1))
	}
	return fmt.Sprintf(`{"v2": {"nodeBootID": %q, "preparedClaims": {%s}}}`, boot, strings.Join(entries, ","))
}

// A user may go back to NVIDIA's DRA driver and come here again. Then its checkpoint may list a
// claim that ended here, because it was prepared there once more.
func TestClaimPreparedAgainByReferenceDriverIsNotEnded(t *testing.T) {
	const (
		aPod       = `{"resource": "pods", "name": "a", "uid": "pod-a"}`
		anotherPod = `{"resource": "pods", "name": "a", "uid": "pod-b"}`
		podGroup   = `{"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g", "uid": "group"}`
		noUID      = `{"resource": "pods", "name": "a"}`
	)
	with := func(first string) string {
		return checkpointWith(map[types.UID]string{"first": first, "second": aPod, "running": aPod})
	}
	for name, c := range map[string]struct {
		reservedFor, rewritten string
		ended                  bool
	}{
		"nothing happened":                       {aPod, "", true},
		"nothing happened, no Pod tells":         {podGroup, "", true},
		"only rewritten":                         {aPod, with(aPod), true},
		"only rewritten by a later version":      {aPod, strings.ReplaceAll(with(aPod), `"info": {`, `"info": {"later": 1, `), true},
		"prepared again for another Pod":         {aPod, with(anotherPod), false},
		"prepared again, shared by a second Pod": {aPod, with(aPod + "," + anotherPod), false},
		"perhaps prepared again for a PodGroup":  {podGroup, with(podGroup), false},
		"perhaps prepared again, no UID":         {noUID, with(noUID), false},
		"perhaps prepared again, not reserved":   {"", with(""), false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			state := filepath.Join(dir, "state")
			write := func(content string) { // as that driver does
				path := filepath.Join(dir, File)
				if err := errors.Join(os.WriteFile(path+".tmp", []byte(content), 0o600), os.Rename(path+".tmp", path)); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.Mkdir(state, 0o700); err != nil {
				t.Fatal(err)
			}
			write(with(c.reservedFor))
			s := NewStore(dir, state, driver, boot, durable.OS{})
			claims, err := s.Claims()
			if err != nil || len(claims) != 3 {
				t.Fatal(claims, err)
			}
			for _, claim := range claims {
				if claim.UID != "running" {
					if _, err := s.MarkEnded(claim); err != nil {
						t.Fatal(err)
					}
				}
			}
			if c.rewritten != "" {
				write(c.rewritten)
			}
			want := []types.UID{"running"}
			if !c.ended {
				want = []types.UID{"first", "running"}
			}
			for _, s := range []*Store{s, NewStore(dir, state, driver, boot, durable.OS{})} {
				claims, err := s.Claims()
				var got []types.UID
				for _, claim := range claims {
					got = append(got, claim.UID)
				}
				if err != nil || !slices.Equal(got, want) {
					t.Errorf("left: %q, %v; want %q", got, err, want)
				}
			}
		})
	}
}

// The checkpoint may change between the release of a claim's devices and the note. The note must
// not be about what was prepared meanwhile.
func TestClaimPreparedAgainWhileItEndsIsNotEnded(t *testing.T) {
	dir := t.TempDir()
	write := func(pod string) {
		content := checkpointWith(map[types.UID]string{"first": `{"resource": "pods", "name": "a", "uid": "` + pod + `"}`})
		if err := os.WriteFile(filepath.Join(dir, File), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("pod-a")
	s := NewStore(dir, filepath.Join(dir, "state"), driver, boot, durable.OS{})
	ending, err := s.Claims()
	if err != nil || len(ending) != 1 {
		t.Fatal(ending, err)
	}
	write("pod-with-another-name")
	if err := os.Mkdir(filepath.Join(dir, "state"), 0o700); err != nil {
		t.Fatal(err)
	}
	renamedTo, err := s.MarkEnded(ending[0])
	if left, leftErr := s.Claims(); err != nil || renamedTo != "" || leftErr != nil || len(left) != 1 {
		t.Errorf("renamed to %q, %v; left %v, %v", renamedTo, err, left, leftErr)
	}
}

func TestWorldWritableCheckpointIsRejected(t *testing.T) {
	dir := t.TempDir()
	s := NewStore(dir, filepath.Join(dir, "state"), driver, boot, durable.OS{})
	if err := os.WriteFile(s.Path(), read(t, "v1.json"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(s.Path(), 0o666); err != nil {
		t.Fatal(err)
	}
	unreadable := new(UnreadableError)
	if _, err := s.Claims(); !errors.As(err, &unreadable) || !strings.Contains(err.Error(), "others may write") {
		t.Errorf("got %v", err)
	}
	if err := os.Chmod(s.Path(), 0o600); err != nil {
		t.Fatal(err)
	}
	if claims, err := s.Claims(); err != nil || len(claims) == 0 {
		t.Errorf("after a chmod to 0600: %v, %v", claims, err)
	}
}

func TestPipeInPlaceOfTheCheckpointIsRejected(t *testing.T) {
	dir := t.TempDir()
	s := NewStore(dir, filepath.Join(dir, "state"), driver, boot, durable.OS{})
	durabletest.Pipe(t, s.Path())
	var err error
	durabletest.Returns(t, func() { _, err = s.Claims() })
	if unreadable := new(UnreadableError); !errors.As(err, &unreadable) || !strings.Contains(err.Error(), "a device, pipe or socket") {
		t.Errorf("got %v", err)
	}
}

func TestChangedCheckpointIsReadAgain(t *testing.T) {
	dir := t.TempDir()
	s := NewStore(dir, filepath.Join(dir, "state"), driver, boot, durable.OS{})
	if claims, err := s.Claims(); claims != nil || err != nil {
		t.Fatal(claims, err)
	}
	for i, name := range []string{"v1.json", "v2.json", "v1.json"} {
		if err := os.WriteFile(s.Path(), read(t, name), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(s.Path(), time.Time{}, time.Unix(int64(1000+i), 0)); err != nil {
			t.Fatal(err)
		}
		want, _, _ := Parse(read(t, name), driver, boot)
		if got, err := s.Claims(); err != nil || cmp.Diff(want, got) != "" {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// While a claim is unprepared, others than the caller of Claims read the checkpoint. That caller
// must learn of the change all the same.
func TestOnlyClaimsAnswersAChange(t *testing.T) {
	dir := t.TempDir()
	s := NewStore(dir, filepath.Join(dir, "state"), driver, boot, durable.OS{})
	if _, err := s.Claims(); err != nil || s.Changed() {
		t.Fatal(err)
	}
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "state"), 0o700), os.WriteFile(s.Path(), read(t, "v2.json"), 0o600)); err != nil {
		t.Fatal(err)
	}
	ended, found, err := s.Claim(first)
	if !found || err != nil {
		t.Fatal(found, err)
	}
	if _, err := s.MarkEnded(ended); err != nil {
		t.Fatal(err)
	}
	if _, found, err := s.Claim(first); found || err != nil {
		t.Errorf("the claim has ended: %v, %v", found, err)
	}
	if !s.Changed() {
		t.Error("the change is forgotten")
	}
	if claims, err := s.Claims(); err != nil || len(claims) != 1 || s.Changed() {
		t.Errorf("%v, %v, changed %v", claims, err, s.Changed())
	}
}

// A copied file keeps its time, and an edited one may keep its size.
func TestCheckpointOfSameSizeAndTimeIsReadAgain(t *testing.T) {
	dir := t.TempDir()
	s := NewStore(dir, filepath.Join(dir, "state"), driver, boot, durable.OS{})
	for _, name := range []string{"v1.json", "v2.json"} {
		padded := append(read(t, name), bytes.Repeat([]byte("\n"), 1<<16-len(read(t, name)))...)
		if err := os.WriteFile(s.Path()+".new", padded, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(s.Path()+".new", time.Time{}, time.Unix(1000, 0)); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(s.Path()+".new", s.Path()); err != nil {
			t.Fatal(err)
		}
		want, _, _ := Parse(read(t, name), driver, boot)
		if got, err := s.Claims(); err != nil || cmp.Diff(want, got) != "" {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range []string{"v1.json", "v2.json"} {
		raw, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	for _, content := range badCheckpoints {
		f.Add([]byte(content))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		claims, outdated, err := Parse(raw, driver, boot)
		if (err != nil || outdated) && claims != nil {
			t.Errorf("claims %v with outdated %v, %v", claims, outdated, err)
		}
		for _, c := range claims {
			if name := string(c.UID); name == "" || filepath.Base(name) != name {
				t.Errorf("claim %q would name a file elsewhere", name)
			}
		}
	})
}
