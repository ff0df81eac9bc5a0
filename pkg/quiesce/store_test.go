package quiesce

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

// golden01 is the stored request as version 0.1 wrote it.
const golden01 = "testdata/v0.1/release"

func TestQuiesceRequestIsReadAndWrittenAsInVersion01(t *testing.T) {
	golden, err := os.ReadFile(golden01)
	if err != nil {
		t.Fatal(err)
	}
	s := newStore(t.TempDir())
	if err := os.WriteFile(s.path, golden, 0o600); err != nil {
		t.Fatal(err)
	}
	reason, err := s.Load()
	if err != nil || reason != "driver 595.45 is being installed" {
		t.Errorf("%q, %v", reason, err)
	}
	if err := s.Save(reason); err != nil {
		t.Error(err)
	}
	if got, err := os.ReadFile(s.path); err != nil || !bytes.Equal(got, golden) {
		t.Errorf("%v\n%s\n%s", err, got, golden)
	}
}

func TestQuiesceRequestForNewerReaderIsRefusedAndKept(t *testing.T) {
	dir, newer := t.TempDir(), []byte(`{"minReader":2}`)
	s := newStore(dir)
	if err := os.WriteFile(filepath.Join(dir, "release"), newer, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := s.Load()
	for _, err := range []error{err, s.Save("it was asked for"), s.Save("")} {
		if refused := new(statefile.NewerError); !errors.As(err, &refused) {
			t.Error(err)
		}
	}
	if got, err := os.ReadFile(s.path); err != nil || !bytes.Equal(got, newer) {
		t.Errorf("%s, %v", got, err)
	}
}

func TestStoredFieldsAreThoseOfThePresentForm(t *testing.T) {
	durabletest.CheckFields(t, "testdata", "v0.1", map[string]any{storeFormat.Kind: storedRequest{}})
}
