package driver

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// quiesceGolden is the stored request as version 0.1 wrote it.
const quiesceGolden = "testdata/v0.1/release"

func TestQuiesceRequestIsReadAndWrittenAsInVersion01(t *testing.T) {
	golden, err := os.ReadFile(quiesceGolden)
	if err != nil {
		t.Fatal(err)
	}
	s := newQuiesceStore(t.TempDir(), func(err error) { t.Error(err) })
	if err := os.WriteFile(s.path, golden, 0o600); err != nil {
		t.Fatal(err)
	}
	reason, err := s.Load()
	if err != nil || reason != "driver 595.45 is being installed" {
		t.Errorf("%q, %v", reason, err)
	}
	s.Save(reason)
	if got, err := os.ReadFile(s.path); err != nil || !bytes.Equal(got, golden) {
		t.Errorf("%v\n%s\n%s", err, got, golden)
	}
}

func TestQuiesceRequestForNewerReaderIsRefusedAndKept(t *testing.T) {
	dir, newer := t.TempDir(), []byte(`{"minReader":2}`)
	var failed []error
	s := newQuiesceStore(dir, func(err error) { failed = append(failed, err) })
	if err := os.WriteFile(filepath.Join(dir, "release"), newer, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := s.Load()
	s.Save("it was asked for")
	s.Save("")
	for _, err := range append(failed, err) {
		if refused := new(statefile.NewerError); !errors.As(err, &refused) {
			t.Error(err)
		}
	}
	if got, err := os.ReadFile(s.path); len(failed) != 2 || err != nil || !bytes.Equal(got, newer) {
		t.Errorf("%q, %s, %v", failed, got, err)
	}
}
