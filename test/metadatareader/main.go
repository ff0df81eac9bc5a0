// Command metadatareader reads the metadata files of its container, as KubeVirt does. It prints the
// devices of a request as "name uuid pciBusID", one a line: first as upstream's package reads them,
// then, after a line "v1alpha1", as a program reads them that knows only that version.
//
//	metadatareader claim|template NAME REQUEST
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
)

const directory = "/var/run/kubernetes.io/dra-device-attributes"

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: metadatareader claim|template NAME REQUEST")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(kind, name, request string) error {
	read, folder := devicemetadata.ReadResourceClaimMetadata, "resourceclaims"
	if kind == "template" {
		read, folder = devicemetadata.ReadResourceClaimTemplateMetadata, "resourceclaimtemplates"
	}
	m, err := read(name, request)
	if err != nil {
		return err
	}
	for _, r := range m.Requests {
		show(r.Devices)
	}
	fmt.Println("v1alpha1")
	files, err := filepath.Glob(filepath.Join(directory, folder, name, request, "*-metadata.json"))
	if err != nil || len(files) != 1 {
		return fmt.Errorf("want one file, found %q: %w", files, err)
	}
	return readOldVersion(files[0])
}

func show(devices []metadata.Device) {
	text := func(a resourceapi.DeviceAttribute) string {
		if a.StringValue == nil {
			return "-"
		}
		return *a.StringValue
	}
	for _, d := range devices {
		fmt.Println(d.Name, text(d.Attributes["uuid"]), text(d.Attributes["resource.kubernetes.io/pciBusID"]))
	}
}

// readOldVersion prints what a reader finds that skips all objects but those of v1alpha1.
func readOldVersion(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	for stream := json.NewDecoder(f); ; {
		var o struct {
			APIVersion string `json:"apiVersion"`
			Requests   []struct {
				Devices []struct {
					Name       string `json:"name"`
					Attributes map[string]struct {
						String string `json:"string"`
					} `json:"attributes"`
				} `json:"devices"`
			} `json:"requests"`
		}
		if err := stream.Decode(&o); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if o.APIVersion != "metadata.resource.k8s.io/v1alpha1" {
			continue
		}
		for _, r := range o.Requests {
			for _, d := range r.Devices {
				fmt.Println(d.Name, d.Attributes["uuid"].String, d.Attributes["resource.kubernetes.io/pciBusID"].String)
			}
		}
	}
}
