// Registry runs the CNCF's image registry for tests, in memory and without TLS. It prints its port,
// which is the same on all addresses:
//
//	registry ADDRESS...
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/distribution/distribution/v3/configuration"
	"github.com/distribution/distribution/v3/registry/handlers"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/inmemory"
	"github.com/sirupsen/logrus"
)

func main() {
	if err := serve(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "registry:", err)
		os.Exit(1)
	}
}

func serve(addresses []string) error {
	if len(addresses) == 0 {
		return errors.New("want the addresses to listen on, like 127.0.0.1")
	}
	logrus.SetOutput(io.Discard) // a line for each request
	config := &configuration.Configuration{Storage: configuration.Storage{"inmemory": nil}}
	config.HTTP.Secret = "one process needs no common secret"
	config.Catalog.MaxEntries = 100
	server := &http.Server{Handler: handlers.NewApp(context.Background(), config), ReadHeaderTimeout: time.Minute}
	port := 0
	failed := make(chan error)
	for _, address := range addresses {
		listener, err := net.Listen("tcp", net.JoinHostPort(address, strconv.Itoa(port)))
		if err != nil {
			return err
		}
		port = listener.Addr().(*net.TCPAddr).Port
		go func() { failed <- server.Serve(listener) }()
	}
	fmt.Println(port)
	return <-failed
}
