package checkpoint

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

// FuzzRecord lets the store read a claim's record with any content. It expects a record or an
// error, and that saving the record again loses nothing. If "sealed", the checksum matches, so that
// the code after it is tested too.
func FuzzRecord(f *testing.F) {
	for _, text := range []string{
		``, `{`, `null`, `[]`, `{"claimUID":"uid"}`, `{"claimUID":"uid","devices":[{"device":"gpu-0000-1b-00-0","shareID":"x",` +
			`"later":1}],"steps":[{"kind":"shared","params":{}}],"later":{"a":[1]}}`,
		`{"claimUID":"uid","devices":null,"steps":[{"kind":"","params":null}],"bootID":""}`, `{"claimUID":"other"}`,
		`{"claimUID":"uid","devices":[{"consumedCapacity":{"memory":"1024Mi","cores":25,"":null,"x":"1e300"}}]}`,
		`{"ClaimUID":"uid","CLAIMUID":"x"}`,
	} {
		f.Add([]byte(text), true)
		f.Add([]byte(text), false)
	}
	f.Fuzz(func(t *testing.T, content []byte, sealed bool) {
		disk := durabletest.New()
		s := open(t, disk)
		if sealed {
			var ok bool
			if content, ok = seal(recordFormat, json.RawMessage(content)); !ok {
				return
			}
		}
		disk.Put(filepath.Join(s.claims, "uid_gpu.json"), content)
		r, found, err := s.Load("uid")
		if !found {
			t.Fatal("a record is not seen")
		}
		if err != nil {
			return
		}
		if err := s.Remove("uid"); err != nil {
			t.Fatal(err)
		}
		if err := s.Save(r); err != nil {
			return // its devices are no valid file name
		}
		again, found, err := s.Load("uid")
		if err != nil || !found || !equalJSON(t, r, again) {
			t.Errorf("%+v was written, and is %+v, %v, %v", r, again, found, err)
		}
	})
}

// FuzzHolder does the same as FuzzRecord, for the file of a GPU setting or MPS daemon that several
// claims share.
func FuzzHolder(f *testing.F) {
	for _, text := range []string{
		`{"key":"a_b","gpus":["g"],"state":"Applied","bootID":"x","step":{"kind":"time-slice","params":{}},"claims":[{"uid":"u"}],"later":1}`,
		`{"key":"a_b"}`, `{"key":1}`, `null`,
	} {
		f.Add([]byte(text), true)
		f.Add([]byte(text), false)
	}
	f.Fuzz(func(t *testing.T, content []byte, sealed bool) {
		disk := durabletest.New()
		s := open(t, disk)
		if sealed {
			var ok bool
			if content, ok = seal(holderFormat, json.RawMessage(content)); !ok {
				return
			}
		}
		disk.Put(filepath.Join(s.holders, "a_b.json"), content)
		h, found, err := s.Holder("a_b")
		if !found {
			t.Fatal("a holder is not seen")
		}
		if err != nil {
			return
		}
		if err := s.SaveHolder(h); err != nil {
			t.Fatal(err)
		}
		if again, _, err := s.Holder("a_b"); err != nil || !equalJSON(t, h, again) {
			t.Errorf("%+v was written, and is %+v, %v", h, again, err)
		}
	})
}

// FuzzFileName expects that no file name counts both as that of a complete claim record and as that
// of a temporary file that an interrupted write left.
func FuzzFileName(f *testing.F) {
	for _, name := range []string{"", ".json", "uid.json", "uid_all.json", "_x.json", "uid__.json", ".tmp-uid_gpu.json", "a/b.json",
		"uid_gpu.json.json"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		e, is := parseFileName(name)
		if is && (e.ClaimUID == "" || e.file != name) {
			t.Errorf("%q is of claim %q", name, e.ClaimUID)
		}
		if uid, unfinished := unfinishedOf(name); unfinished && is {
			t.Errorf("%q is a record, and unfinished, of %q", name, uid)
		}
	})
}

// equalJSON reports whether a and b have the same JSON encoding.
func equalJSON(t *testing.T, a, b any) bool {
	t.Helper()
	x, err := json.Marshal(a)
	y, err2 := json.Marshal(b)
	if err != nil || err2 != nil {
		t.Fatal(err, err2)
	}
	return bytes.Equal(x, y)
}

// seal returns the content of a file in this format with a payload, or false if the payload cannot
// be encoded.
func seal(format statefile.Format, payload any) ([]byte, bool) {
	disk := durabletest.New()
	if format.Write(disk, "/file", payload) != nil {
		return nil, false
	}
	raw, err := disk.ReadFile("/file")
	return raw, err == nil
}
