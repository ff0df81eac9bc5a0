package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable/durabletest"
)

// golden is the directory with claims' checkpoint records as released versions wrote them, under
// their original file names. Its subdirectories' names start with the format version. Never change
// the records of a released version.
const golden = "testdata/records"

func TestRecordsOfEveryVersionAreReadWithoutLoss(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(golden, "*", "*.json"))
	if err != nil || len(files) < 4 {
		t.Fatalf("%q, %v", files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(filepath.Dir(file)), func(t *testing.T) {
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			disk := durabletest.New()
			s := open(t, disk)
			path := filepath.Join(claims, filepath.Base(file))
			disk.Put(path, raw)
			r, found, err := s.Load(uid)
			if err != nil || !found || r.State != Prepared || len(r.Devices) == 0 || len(r.Steps) == 0 {
				t.Fatalf("%+v, %v, %v", r, found, err)
			}
			// Whichever version wrote the record first, this version must save it under the same name and
			// with the same payload.
			save(t, s, r)
			if names := disk.Names(claims); len(names) != 1 || names[0] != filepath.Base(file) {
				t.Errorf("the files are %q", names)
			}
			again, err := disk.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			before, after := payloadOf(t, raw), payloadOf(t, again)
			if diff := cmp.Diff(before.Payload, after.Payload); diff != "" {
				t.Error(diff)
			}
			if after.FormatVersion != FormatVersion {
				t.Errorf("written as version %d", after.FormatVersion)
			}
			if before.FormatVersion == FormatVersion && string(raw) != string(again) {
				t.Errorf("other bytes for the same record:\n%s\n%s", raw, again)
			}
		})
	}
}

type opened struct {
	FormatVersion int            `json:"formatVersion"`
	Payload       map[string]any `json:"payload"`
}

func payloadOf(t *testing.T, raw []byte) (e opened) {
	t.Helper()
	if err := json.Unmarshal(raw, &e); err != nil {
		t.Fatal(err)
	}
	return e
}

func TestRecordForNewerReaderIsRefused(t *testing.T) {
	payload := `{"claimUID":"` + string(uid) + `","state":"Prepared","devices":[],"steps":[]}`
	for _, c := range []struct {
		envelope string
		readable bool
	}{
		{`"formatVersion":1`, true},
		{`"formatVersion":7,"readableFrom":1`, true},
		{`"formatVersion":2`, false},
		{`"formatVersion":3,"readableFrom":2`, false},
		{`"formatVersion":2,"readableFrom":-1`, false},
	} {
		disk := durabletest.New()
		s := open(t, disk)
		disk.Put(filepath.Join(claims, string(uid)+"_"+gpu0+".json"), fmt.Appendf(nil, `{%s,"checksum":%q,"payload":%s}`, c.envelope,
			checksum([]byte(payload)), payload))
		_, found, err := s.Load(uid)
		future := new(FutureError)
		if !found || c.readable != (err == nil) || !c.readable && (!errors.As(err, &future) ||
			!strings.Contains(err.Error(), "install the later driver again")) {
			t.Errorf("%s: %v, %v", c.envelope, found, err)
		}
	}
}
