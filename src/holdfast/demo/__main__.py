import sys

from holdfast.demo import main

sys.exit(main())
